"""2:4 convolutions and Linear layers on Hopper's tensor cores (`wgmma`, compute capability 9.0).

Two families share the source: `wgmma_sp` multiplies only the kept weights, `wgmma` all of them. As with `mma`, the
dense baseline isolates the effect of sparsity, and can be the fastest kernel for layers that are not 2:4.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, wgmma
from halve.engine.kernels.cuda.convolution import ConvolutionFamily, as_convolution, as_images
from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.wgmma_sp import launch
from halve.engine.kernels.wgmma_sp.packing import pack, pack_dense, packed_shape, unpack, unpack_dense
from halve.engine.kernels.wgmma_sp.tiling import TILES, Tiling, supported
from halve.engine.operations import Convolution, Linear, Operation, Tensors


class _Wgmma(ConvolutionFamily):
    @property
    def version(self) -> str:
        return launch.version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return wgmma.unavailable(device, dtype)

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, Convolution | Linear) or piece.dtype not in wgmma.DTYPES:
            return ()
        if not supported(operation.convolution) or (self.sparse and not piece.is_2_4):
            return ()
        return tuple(TILES)

    def pack_weight(self, weight: Tensor, convolution: Convolution) -> dict[str, Tensor]:
        return {"blocks": (pack if self.sparse else pack_dense)(weight, convolution)}

    def unpack_weight(self, packed: Tensors, convolution: Convolution) -> Tensor:
        return (unpack if self.sparse else unpack_dense)(packed["blocks"], convolution)

    def packed_shapes(self, convolution: Convolution) -> dict[str, tuple[int, ...]]:
        return {"blocks": packed_shape(convolution, self.sparse)}

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        tiling = self._tiling(as_images(inputs, operation), operation, variant)
        return tiling is not None and super().fits(inputs, operation, variant)

    def promising(self, inputs: Sequence[Tensor], operation: Operation, variants: Sequence[str]) -> Sequence[str]:
        images, convolution = as_images(inputs, operation), as_convolution(operation)
        return launch.worth_timing(images[0], convolution, variants, sparse=self.sparse, residual=len(images) > 1)

    def compilation(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> partial[Any] | None:
        images = as_images(inputs, operation)
        plan, convolution = self._tiling(images, operation, variant), as_convolution(operation)
        if plan is None:
            return None
        residual = len(images) > 1
        described = launch.variant_of(plan, convolution, images[0].dtype, sparse=self.sparse, residual=residual)
        return partial(launch.machine_code, described, driver.architecture(images[0].device.index))

    def _tiling(self, images: Sequence[Tensor], operation: Operation, variant: str) -> Tiling | None:
        residual = len(images) > 1
        return launch.fitting(images[0], as_convolution(operation), variant, sparse=self.sparse, residual=residual)

    def launch(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution, variant: str) -> Tensor:
        residual = inputs[1] if len(inputs) > 1 else None
        added = residual is not None
        plan = launch.usable(inputs[0], convolution, variant, sparse=self.sparse, residual=added)
        if plan is None:  # such as images whose rows are longer than any tile
            return self.reference(inputs, packed, convolution)
        operands = launch.Operands(inputs[0], packed["blocks"], packed.get("bias"), packed.get("scale"), residual)
        return launch.run(operands, convolution, plan, self.sparse)


class WgmmaSparse(_Wgmma):
    name = "wgmma_sp"
    sparse = True


class WgmmaDense(_Wgmma):
    name = "wgmma"
