"""What `wgmma` kernels for two layers share: where they run, and checks of their arguments."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halve.engine.kernels.cuda import wgmma
from halve.engine.kernels.cuda.convolution import check_aligned
from halve.engine.kernels.kernel import KernelFamily, Layout
from halve.engine.kernels.wgmma_sp import launch
from halve.engine.operations import Tensors
from halve.errors import EngineError


class TwoLayerFamily(KernelFamily):
    """A family of kernels for two layers, which read two NHWC images."""

    device_type = "cuda"
    reads = Layout.NHWC

    @property
    def version(self) -> str:
        return launch.version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return wgmma.unavailable(device, dtype)


def check_images(inputs: Sequence[Tensor], channels: tuple[int, int]) -> None:
    """Raise `EngineError` unless the inputs are images with these channels."""
    x, second = inputs
    if x.dim() != 4 or second.dim() != 4 or (x.shape[1], second.shape[1]) != channels:
        raise EngineError(
            f"the inputs must have {channels[0]} and {channels[1]} channels, "
            f"got shapes {tuple(x.shape)} and {tuple(second.shape)}"
        )


def check_fit(inputs: Sequence[Tensor], fit: bool) -> None:
    """Raise `EngineError` unless the images fit together."""
    if not fit:
        x, second = inputs
        raise EngineError(f"inputs of shapes {tuple(x.shape)} and {tuple(second.shape)} do not fit together")


def check_packed(
    inputs: Sequence[Tensor], packed: Tensors, blocks: Mapping[str, tuple[int, ...]], biases: Mapping[str, int]
) -> None:
    """Raise `EngineError` if the kernel would misread packed tensors or read out of bounds.

    Args:
        inputs: the images.
        packed: the packed tensors.
        blocks: the shape of each packed weight.
        biases: the length of each bias that there may be.
    """
    x, second = inputs
    for name, shape in blocks.items():
        tensor = packed[name]
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise EngineError(f"{name} must be contiguous with shape {shape}, got {tuple(tensor.shape)}")
        if len({x.dtype, second.dtype, tensor.dtype}) > 1 or len({x.device, second.device, tensor.device}) > 1:
            raise EngineError("the inputs and the weights must have one dtype and one device: convert the inputs")
        if x.is_cuda:
            check_aligned(name, tensor)
    for name, rows in biases.items():
        bias = packed.get(name)
        if bias is None:
            continue
        if bias.dtype != torch.float32 or bias.numel() != rows or not bias.is_contiguous() or bias.device != x.device:
            raise EngineError(f"{name} must be {rows} contiguous values in float32 on {x.device}")
