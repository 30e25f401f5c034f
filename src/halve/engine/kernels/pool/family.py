"""Max pooling without indices. PyTorch also writes the index of each maximum, which inference does not need."""

from collections.abc import Sequence

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.kernel import KernelFamily, Layout, Piece
from halve.engine.kernels.pool import launch
from halve.engine.operations import MaxPool, Operation, Tensors


class Pool(KernelFamily):
    name = "pool"
    device_type = "cuda"
    reads = writes = Layout.NHWC

    @property
    def version(self) -> str:
        return launch.version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return driver.unavailable(device) or jit.unavailable()

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        return ("nhwc",) if isinstance(piece.operation, MaxPool) and piece.dtype in launch.DTYPES else ()

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        [x] = inputs
        assert isinstance(operation, MaxPool)
        if not launch.fits(x, operation.kernel):
            return operation.reference(inputs, packed)
        return launch.run(x, operation)
