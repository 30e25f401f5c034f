"""The pooling kernel, and where it can run. `halve.engine.ops` specifies what it computes."""

import ctypes
import functools
from collections.abc import Sequence
from importlib import resources

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.errors import EngineError

_DTYPES = (torch.float16, torch.bfloat16)
_PIECE = 8  # channels of one thread: 16 bytes
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
    """Whether there is a kernel for these images: some, on a GPU, channels last, in pieces of 16 bytes."""
    return (
        x.is_cuda
        and x.dim() == 4
        and x.dtype in _DTYPES
        and x.shape[1] % _PIECE == 0
        and x.numel() > 0
        and x.is_contiguous(memory_format=_NHWC)
        and x.data_ptr() % 16 == 0
        and _kernel(x.dtype, tuple(kernel), x.device.index) is not None
    )


def run(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """Start the kernel on the current stream; `size` is the height and width of the result."""
    images, channels, height, width = x.shape
    out = torch.empty((images, channels, *size), dtype=x.dtype, device=x.device, memory_format=_NHWC)
    shape = _Shape(height, width, channels, *size, *stride, *padding, *dilation)
    grid = (images * size[0], -(-size[1] * channels // _PIECE // _THREADS))
    max_pool = _kernel(x.dtype, tuple(kernel), x.device.index)
    assert max_pool is not None
    max_pool.launch(grid, _THREADS, (x, out, shape))
    return out


def machine_code(dtype: torch.dtype, kernel: tuple[int, ...], architecture: str) -> bytes:
    """The cubin for a type and a window, compiled now or before."""
    source = resources.files(__package__).joinpath("pool.cu").read_text()
    values = {"BF16": int(dtype == torch.bfloat16), "KERNEL_H": kernel[0], "KERNEL_W": kernel[1]}
    return jit.cubin(source, architecture, tuple(f"-D{name}={value}" for name, value in values.items()))


@functools.cache
def _kernel(dtype: torch.dtype, kernel: tuple[int, ...], device: int) -> driver.Kernel | None:
    """None where it cannot be compiled or loaded: PyTorch has a kernel of its own."""
    if driver.missing(torch.device("cuda", device)) is not None:
        return None
    try:
        return driver.Kernel(machine_code(dtype, kernel, driver.architecture(device)), "max_pool", device, 0)
    except EngineError:
        return None
