"""Compile and launch the kernel for first layers."""

import ctypes
import functools

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.cuda.tensor_map import tensor_map
from halve.engine.kernels.cuda.wgmma import multiply_source
from halve.engine.operations import PooledConvolution

_NHWC = torch.channels_last
_GROUPS, _PAIRS, _WEIGHT_BYTES = 4, 5, 14 * 2048  # as in stem.cu
_MAX_WIDTH = 256


class _Shape(ctypes.Structure):
    """`Shape` in stem.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("height", "out_height", "pooled_height", "strip_rows", "strips_per_image", "strips")
    )


def supported(operation: PooledConvolution) -> bool:
    """Whether the kernel computes this operation, on images of some size."""
    wanted = PooledConvolution(64, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
    return operation == wanted


def fits(x: Tensor) -> bool:
    """Whether the kernel supports images of this size."""
    return x.dim() == 4 and x.numel() > 0 and x.shape[3] % 32 == 0 and x.shape[3] <= _MAX_WIDTH and x.shape[2] >= 2


def strip_rows(images: int, height: int, groups: int) -> int:
    """How many rows of the result a warpgroup computes at once, so that all of them finish soonest.

    Each strip computes one row of the convolution that its neighbour computes too.

    >>> strip_rows(1, 56, 528), strip_rows(256, 56, 528)
    (1, 28)
    """

    def time(rows: int) -> int:
        return -(-images * -(-height // rows) // groups) * (2 * rows + 4)  # with four pairs of rows to load first

    return min(range(1, height + 1), key=time)


def run(x: Tensor, packed: Tensor, bias: Tensor, operation: PooledConvolution) -> Tensor:
    """Launch the kernel on the current stream. Images are channels last or contiguous, and aligned to 16 bytes."""
    images, _, height, width = x.shape
    out_height, out_width = operation.convolution.out_size(height, width)
    out = torch.empty(operation.out_shape(x.shape), dtype=x.dtype, device=x.device, memory_format=_NHWC)
    _, rows, pooled_height, pooled_width = out.shape
    processors = driver.processors(x.device.index)
    each = strip_rows(images, pooled_height, processors * _GROUPS)
    per_image = -(-pooled_height // each)
    kernel = _kernel(x.dtype, out_width, x.is_contiguous(), x.device.index)
    size, box = (rows, pooled_width, pooled_height, images), (rows, pooled_width, 1, 1)
    shape = _Shape(height, out_height, pooled_height, each, per_image, images * per_image)
    arguments = (x, tensor_map(out, size, box, (1, 1, 1, 1)), packed, bias, shape)
    kernel.launch((min(processors, images * per_image), 1), 128 * _GROUPS, arguments)
    return out


def machine_code(dtype: torch.dtype, pixels: int, planar: bool, architecture: str) -> bytes:
    """The cubin for a dtype, the width of the convolution and the layout of images, compiled on first use."""
    bf16 = dtype == torch.bfloat16
    source = _source().replace("//MULTIPLY", multiply_source(pixels, sparse=False, bf16=bf16))
    return jit.cubin(source, architecture, (f"-DBF16={int(bf16)}", f"-DPIXELS={pixels}", f"-DPLANAR={int(planar)}"))


@functools.cache
def _source() -> str:
    return jit.source(__package__, "stem.cu")


def version() -> str:
    """A digest of the source."""
    return jit.digest(_source(), multiply_source(8, sparse=False, bf16=False))


def shared_bytes(pixels: int) -> int:
    """As in stem.cu: weights, a row of the result and a ring of input rows for each warpgroup.

    Rows of matrices overlap there, which compute-sanitizer does not know: it takes the last ones for twice as long.
    """
    out = -(-pixels // 2 * 128 // 1024) * 1024
    overlap = 32 * pixels
    return _WEIGHT_BYTES + _GROUPS * (out + _PAIRS * 2 * (2 * pixels + 6) * 8) + overlap


@functools.cache
def _kernel(dtype: torch.dtype, pixels: int, planar: bool, device: int) -> driver.Kernel:
    code = machine_code(dtype, pixels, planar, driver.architecture(device))
    return driver.Kernel(code, "stem", device, shared_bytes(pixels))
