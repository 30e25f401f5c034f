"""The first layer with its pooling in one kernel (`wgmma`, compute capability 9.0). Its weights are dense."""

from collections.abc import Sequence

import torch
from torch import Tensor

from halve.engine.kernels.cuda import wgmma
from halve.engine.kernels.cuda.convolution import check_aligned
from halve.engine.kernels.kernel import KernelFamily, Layout, Piece
from halve.engine.kernels.stem import launch
from halve.engine.kernels.stem.packing import SHAPE, pack, unpack
from halve.engine.operations import Operation, PooledConvolution, Tensors
from halve.errors import EngineError


class Stem(KernelFamily):
    """Reads images as they are, channels last or contiguous."""

    name = "stem"
    device_type = "cuda"
    writes = Layout.NHWC

    @property
    def version(self) -> str:
        return launch.version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return wgmma.unavailable(device, dtype)

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        fits = isinstance(operation, PooledConvolution) and launch.supported(operation)
        return ("pooled",) if fits and piece.dtype in wgmma.DTYPES else ()

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        return launch.fits(inputs[0])

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        return {**tensors, "weight": pack(tensors["weight"])}

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        return {**packed, "weight": unpack(packed["weight"])}

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        [x], weight, bias = inputs, packed["weight"], packed.get("bias")
        if not x.is_cuda or not launch.fits(x):
            return operation.reference(inputs, self.unpack(operation, packed))
        assert isinstance(operation, PooledConvolution)
        if x.dtype != weight.dtype or x.shape[1] != operation.channels or tuple(weight.shape) != SHAPE:
            raise EngineError(
                f"the kernel needs {operation.channels} channels in {weight.dtype} and a packed weight, "
                f"got {tuple(x.shape)} in {x.dtype} and {tuple(weight.shape)}"
            )
        if bias is None:
            bias = torch.zeros(operation.rows, device=x.device)
        if bias.dtype != torch.float32 or bias.numel() != operation.rows or not weight.is_contiguous():
            raise EngineError(
                f"the bias must be {operation.rows} values in float32, got {bias.numel()} in {bias.dtype}"
            )
        check_aligned("weight", weight)
        if not x.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous()
        x = x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.preserve_format)
        return launch.run(x, weight, bias, operation)
