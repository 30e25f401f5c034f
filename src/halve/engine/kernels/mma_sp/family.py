"""2:4 convolutions and Linear layers on sparse tensor cores (`mma.sp`, compute capability 8.0 and up).

Two families share the source: `mma_sp` multiplies only the kept weights, `mma` all of them. `mma` is the dense baseline
of the same kernel: it isolates the effect of sparsity, and can be the fastest kernel for layers that are not 2:4.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.cuda.convolution import ConvolutionFamily, as_convolution
from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.mma_sp import launch
from halve.engine.kernels.mma_sp.packing import pack, pack_dense, packed_shapes, restored
from halve.engine.kernels.wgmma_sp.family import WgmmaDense, WgmmaSparse
from halve.engine.operations import Convolution, Linear, Operation, Tensors


class _Mma(ConvolutionFamily):
    max_pixels = (1 << 28) - 1  # conv.cu takes row -2^28 for one that is outside of any image

    @property
    def version(self) -> str:
        return launch.version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if (reason := driver.unavailable(device)) is not None:
            return reason
        if dtype not in launch.DTYPES:
            return f"our sparse kernels need float16 or bfloat16, got {dtype}: pass dtype=torch.float16"
        return jit.unavailable()

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, Convolution | Linear) or piece.dtype not in launch.DTYPES:
            return ()
        convolution = operation.convolution
        if (
            convolution.groups > 1
            or convolution.scaled
            or convolution.channels % 4
            or (self.sparse and not piece.is_2_4)
        ):
            return ()
        return tuple(launch.TILES)

    def promising(self, inputs: Sequence[Tensor], operation: Operation, variants: Sequence[str]) -> Sequence[str]:
        convolution, x = as_convolution(operation), inputs[0]
        if not self._has_hopper_kernel(inputs, operation):
            return variants
        pixels = math.prod(operation.out_shape(x.shape)) // convolution.rows
        return launch.worth_timing(convolution.rows, pixels, driver.processors(x.device.index), variants)

    def _has_hopper_kernel(self, inputs: Sequence[Tensor], operation: Operation) -> bool:
        """Whether there is a `wgmma` kernel for these inputs: it has none for wide images."""
        hopper, x = WgmmaSparse() if self.sparse else WgmmaDense(), inputs[0]
        if hopper.unavailable(x.device, x.dtype) is not None:
            return False
        tiles = hopper.variants(Piece(operation, x.dtype, is_2_4=self.sparse), x.device)
        return any(hopper.fits(inputs, operation, tile) for tile in tiles)

    def compilation(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> partial[Any] | None:
        convolution, x = as_convolution(operation), inputs[0]
        described = launch.Variant(self.sparse, x.dtype, convolution.channels, convolution.activation, variant)
        return partial(launch.machine_code, described, driver.architecture(x.device.index))

    def unpack_weight(self, packed: Tensors, convolution: Convolution) -> Tensor:
        return restored(packed["values"], packed.get("metadata"), convolution.weight_shape)

    def packed_shapes(self, convolution: Convolution) -> dict[str, tuple[int, ...]]:
        values, metadata = packed_shapes(convolution.weight_shape, self.sparse)
        return {"values": values} if metadata is None else {"values": values, "metadata": metadata}

    def launch(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution, variant: str) -> Tensor:
        residual = inputs[1] if len(inputs) > 1 else None
        operands = launch.Operands(inputs[0], packed["values"], packed.get("metadata"), packed.get("bias"), residual)
        return launch.run(operands, convolution, variant)


class MmaSparse(_Mma):
    name = "mma_sp"
    sparse = True

    def pack_weight(self, weight: Tensor, convolution: Convolution) -> dict[str, Tensor]:
        packed = pack(weight, weight != 0)
        return {"values": packed.values, "metadata": packed.metadata}


class MmaDense(_Mma):
    name = "mma"

    def pack_weight(self, weight: Tensor, convolution: Convolution) -> dict[str, Tensor]:
        return {"values": pack_dense(weight)}
