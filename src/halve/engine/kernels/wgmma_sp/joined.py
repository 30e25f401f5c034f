"""A convolution and the 1x1 convolution of its shortcut in one `wgmma` kernel: their sums are one sum.

The result of the shortcut is neither written nor read: where memory is the limit, that is what a block of a ResNet
which changes the resolution waits for. Two families, as for single convolutions.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, wgmma
from halve.engine.kernels.cuda.convolution import readable
from halve.engine.kernels.kernel import Layout, Piece
from halve.engine.kernels.wgmma_sp import launch
from halve.engine.kernels.wgmma_sp.packing import pack, pack_dense, packed_shape, unpack, unpack_dense
from halve.engine.kernels.wgmma_sp.tiling import TILES, Shortcut, Tiling, supported
from halve.engine.kernels.wgmma_sp.two_layers import TwoLayerFamily, check_fit, check_images, check_packed
from halve.engine.operations import JoinedConvolution, Operation, Tensors


class _Joined(TwoLayerFamily):
    """The blocks of both weights follow each other: (row blocks, steps, elements of a block)."""

    writes = Layout.NHWC

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, JoinedConvolution) or piece.dtype not in wgmma.DTYPES:
            return ()
        if not supported(operation.convolution) or not supported(operation.shortcut):
            return ()
        return () if self.sparse and not piece.is_2_4 else tuple(TILES)

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        joined = _joined(operation)
        packing = pack if self.sparse else pack_dense
        parts = [packing(tensors["weight"], joined.convolution), packing(tensors["shortcut_weight"], joined.shortcut)]
        bias = {"bias": tensors["bias"]} if "bias" in tensors else {}
        return {"blocks": torch.cat([part.flatten(1, 2) for part in parts], 1).contiguous(), **bias}

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        joined, tensors = _joined(operation), {}
        unpacking = unpack if self.sparse else unpack_dense
        shapes = [packed_shape(one, self.sparse) for one in (joined.convolution, joined.shortcut)]
        first = shapes[0][1] * shapes[0][2]
        for name, shape, convolution, blocks in zip(
            ("weight", "shortcut_weight"),
            shapes,
            (joined.convolution, joined.shortcut),
            (packed["blocks"][:, :first], packed["blocks"][:, first:]),
            strict=True,
        ):
            tensors[name] = unpacking(blocks.reshape(shape), convolution)
        return tensors | ({"bias": packed["bias"]} if "bias" in packed else {})

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        return self._tiling(inputs, _joined(operation), variant) is not None

    def promising(self, inputs: Sequence[Tensor], operation: Operation, variants: Sequence[str]) -> Sequence[str]:
        joined = _joined(operation)
        return launch.worth_timing(
            inputs[0], joined.convolution, variants, sparse=self.sparse, shortcut=_shortcut(joined)
        )

    def compilation(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> partial[Any] | None:
        joined, x = _joined(operation), inputs[0]
        plan = self._tiling(inputs, joined, variant)
        if plan is None:
            return None
        described = launch.variant_of(plan, joined.convolution, x.dtype, sparse=self.sparse, shortcut=True)
        return partial(launch.machine_code, described, driver.architecture(x.device.index))

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        joined = _joined(operation)
        self._check(inputs, packed, joined)
        plan, first = None, inputs[0]
        if first.is_cuda and first.numel():
            plan = launch.usable(first, joined.convolution, variant, sparse=self.sparse, shortcut=_shortcut(joined))
        if plan is None:
            result = joined.reference(inputs, _in_dtype(self.unpack(operation, packed)))
            return result.contiguous(memory_format=torch.channels_last)
        x, shortcut = map(readable, inputs)
        operands = launch.Operands(x, packed["blocks"], packed.get("bias"), shortcut=shortcut)
        return launch.run(operands, joined.convolution, plan, self.sparse, _shortcut(joined))

    def _tiling(self, inputs: Sequence[Tensor], joined: JoinedConvolution, variant: str) -> Tiling | None:
        if not inputs[0].numel():
            return None
        return launch.fitting(inputs[0], joined.convolution, variant, sparse=self.sparse, shortcut=_shortcut(joined))

    def _check(self, inputs: Sequence[Tensor], packed: Tensors, joined: JoinedConvolution) -> None:
        """Raise `EngineError` if the kernel would misread the arguments or read out of bounds."""
        check_images(inputs, (joined.channels, joined.shortcut_channels))
        x, shortcut = inputs
        check_fit(inputs, joined.out_shape(x.shape) == joined.shortcut.out_shape(shortcut.shape))
        shapes = [packed_shape(one, self.sparse) for one in (joined.convolution, joined.shortcut)]
        blocks = (shapes[0][0], sum(shape[1] * shape[2] for shape in shapes), shapes[0][3])
        check_packed(inputs, packed, {"blocks": blocks}, {"bias": joined.rows})


def _joined(operation: Operation) -> JoinedConvolution:
    assert isinstance(operation, JoinedConvolution)
    return operation


def _shortcut(joined: JoinedConvolution) -> Shortcut:
    return Shortcut(joined.shortcut_channels, joined.shortcut_stride[0])


def _in_dtype(tensors: Tensors) -> dict[str, Tensor]:
    """With the bias in the weight's dtype, for plain PyTorch."""
    return {name: tensor.to(tensors["weight"].dtype) for name, tensor in tensors.items()}


class JoinedSparse(_Joined):
    name = "wgmma_sp_joined"
    sparse = True


class JoinedDense(_Joined):
    name = "wgmma_joined"
