"""Compile and launch the max pooling kernel."""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.operations import MaxPool
from halve.errors import EngineError

DTYPES = (torch.float16, torch.bfloat16)
_PIECE = 8  # channels per thread: 16 bytes
_THREADS = 128
_NHWC = torch.channels_last


class _Shape(ctypes.Structure):
    """`Shape` in pool.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("height", "width", "channels", "out_height", "out_width"),
            *("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w"),
        )
    )


def fits(x: Tensor, kernel: Sequence[int]) -> bool:
    """Whether the kernel supports these images: on a GPU, channels last, 16-byte aligned, channels divisible by 8."""
    return (
        x.is_cuda
        and x.dim() == 4
        and x.dtype in DTYPES
        and x.shape[1] % _PIECE == 0
        and x.numel() > 0
        and x.is_contiguous(memory_format=_NHWC)
        and x.data_ptr() % 16 == 0
        and _kernel(x.dtype, tuple(kernel), x.device.index) is not None
    )


def run(x: Tensor, pool: MaxPool) -> Tensor:
    """Launch the kernel on the current stream."""
    images, channels, height, width = x.shape
    _, _, out_height, out_width = pool.out_shape(x.shape)
    out = torch.empty((images, channels, out_height, out_width), dtype=x.dtype, device=x.device, memory_format=_NHWC)
    shape = _Shape(height, width, channels, out_height, out_width, *pool.stride, *pool.padding, *pool.dilation)
    grid = (images * out_height, -(-out_width * channels // _PIECE // _THREADS))
    max_pool = _kernel(x.dtype, pool.kernel, x.device.index)
    assert max_pool is not None
    max_pool.launch(grid, _THREADS, (x, out, shape))
    return out


def machine_code(dtype: torch.dtype, kernel: tuple[int, ...], architecture: str) -> bytes:
    """The cubin for a dtype and window size, compiled on first use."""
    values = {"BF16": int(dtype == torch.bfloat16), "KERNEL_H": kernel[0], "KERNEL_W": kernel[1]}
    return jit.cubin(_source(), architecture, tuple(f"-D{name}={value}" for name, value in values.items()))


@functools.cache
def _source() -> str:
    return jit.source(__package__, "pool.cu")


def version() -> str:
    """A digest of the source."""
    return jit.digest(_source())


@functools.cache
def _kernel(dtype: torch.dtype, kernel: tuple[int, ...], device: int) -> driver.Kernel | None:
    """The loaded kernel, or None if it cannot be compiled or loaded: then PyTorch's kernel runs."""
    if driver.unavailable(torch.device("cuda", device)) is not None:
        return None
    try:
        return driver.Kernel(machine_code(dtype, kernel, driver.architecture(device)), "max_pool", device, 0)
    except EngineError:
        return None
