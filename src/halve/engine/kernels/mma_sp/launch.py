"""Compile and launch the `mma.sp` convolution in its tile sizes."""

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.operations import ACTIVATIONS, Convolution
from halve.errors import EngineError

DTYPES = (torch.float16, torch.bfloat16)
_NHWC = torch.channels_last
_STAGES, _TILE_K, _PITCH = (
    3,
    64,
    4,
)  # as in conv.cu: pipeline stages, channels per tile, padding of output rows in floats


class Tile(NamedTuple):
    """The output tile of one thread block, and its warps along output channels, pixels and K."""

    row_tiles: int  # of 16 output channels, per warp
    pixel_tiles: int  # of 8 pixels, per warp
    warps_m: int
    warps_n: int
    warps_k: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps_m

    @property
    def pixels(self) -> int:
        return 8 * self.pixel_tiles * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    @property
    def shared_bytes(self) -> int:
        copied = _STAGES * self.warps_k * self.pixels * _TILE_K * 2
        return max(copied, self.warps_k * self.pixels * (self.rows + _PITCH) * 4)

    def __str__(self) -> str:
        return f"{self.rows}x{self.pixels}" + (f"k{self.warps_k}" if self.warps_k > 1 else "")


TILES = {
    str(tile): tile
    for tile in (
        Tile(4, 4, 2, 4),  # 128x128, for large layers
        Tile(2, 8, 2, 2),  # 64x128
        Tile(2, 4, 2, 2),  # 64x64
        Tile(2, 4, 2, 1, 4),  # 64x32, split four ways along K
        Tile(2, 4, 1, 1, 8),  # 32x32, for layers with few pixels
        Tile(1, 4, 1, 1, 8),
    )
}

# Where Hopper's own kernels can run a layer, these are the fastest in small tiles only, and only if those are few: at
# most 0.8, 0.8, 1.5 and 3 blocks per multiprocessor in all measurements (benchmarks/results/gpu_layers.json).
_FEW_BLOCKS = {"16x32k8": 2, "32x32k8": 2, "64x32k4": 3, "64x64": 6}  # per multiprocessor: with more they are not timed


def worth_timing(rows: int, pixels: int, processors: int, tiles: Sequence[str]) -> list[str]:
    """Those of the tiles that may be faster than Hopper's own kernels, for a result of so many rows and pixels.

    >>> worth_timing(512, 49, 132, list(TILES))
    ['64x64', '64x32k4', '32x32k8', '16x32k8']
    >>> worth_timing(64, 8 * 56 * 56, 132, list(TILES))
    ['64x64']
    """

    def blocks(tile: Tile) -> int:
        return -(-rows // tile.rows) * -(-pixels // tile.pixels)

    return [name for name in tiles if blocks(TILES[name]) <= _FEW_BLOCKS.get(name, 0) * processors]


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    sparse: bool
    dtype: torch.dtype
    channels: int  # input channels; multiples of 8 are copied faster
    activation: str
    tile: str

    def options(self) -> tuple[str, ...]:
        """Preprocessor definitions for the compiler."""
        if self.dtype not in DTYPES:
            raise EngineError(f"the kernel needs float16 or bfloat16, got {self.dtype}")
        if self.channels % 4:
            raise EngineError(f"the number of input channels must be divisible by 4, got {self.channels}")
        if self.tile not in TILES:
            raise EngineError(f"unknown tile {self.tile!r}: must be one of {', '.join(TILES)}")
        piece = 8 if self.channels % 8 == 0 else 4
        tile = {name.upper(): value for name, value in TILES[self.tile]._asdict().items()}
        if self.activation not in ACTIVATIONS:
            raise EngineError(f"unknown activation {self.activation!r}: must be one of {', '.join(ACTIVATIONS)}")
        bf16, activation = int(self.dtype == torch.bfloat16), f"activate_{self.activation}"
        values = {"SPARSE": int(self.sparse), "BF16": bf16, "PIECE": piece, "ACTIVATE": activation, **tile}
        return tuple(f"-D{name}={value}" for name, value in values.items())


class _Shape(ctypes.Structure):
    """`Shape` in conv.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *(
                "images",
                "height",
                "width",
                "channels",
                "out_height",
                "out_width",
                "out_channels",
                "kernel_h",
                "kernel_w",
            ),
            *("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "row_tiles"),
        )
    )


def machine_code(variant: Variant, architecture: str) -> bytes:
    """The cubin of a variant, compiled on first use."""
    return _machine_code(variant.options(), architecture)


@functools.cache
def _machine_code(options: tuple[str, ...], architecture: str) -> bytes:
    return jit.cubin(_source(), architecture, options)


@functools.cache
def _source() -> str:
    return jit.source(__package__, "conv.cu")


def version() -> str:
    """A digest of the source and the tiles."""
    return jit.digest(_source(), repr(TILES))


class Operands(NamedTuple):
    """The tensors of one launch: on one GPU, images channels last, bias in float32."""

    x: Tensor
    values: Tensor  # without metadata, the packed dense weight
    metadata: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


def run(operands: Operands, convolution: Convolution, tile: str) -> Tensor:
    """Launch the kernel on the current stream."""
    x, values, metadata, bias, residual = operands
    images, channels, height, width = x.shape
    rows, out_height, out_width = convolution.rows, *convolution.out_size(height, width)
    out = torch.empty((images, rows, out_height, out_width), dtype=x.dtype, device=x.device, memory_format=_NHWC)
    pixels = images * out_height * out_width
    if not pixels:
        return out
    variant = Variant(metadata is not None, x.dtype, channels, convolution.activation, tile)
    kernel = _kernel(variant.options(), x.device.index, TILES[tile].shared_bytes)
    shape = _Shape(
        *(images, height, width, channels, out_height, out_width, rows),
        *(*convolution.kernel, *convolution.stride, *convolution.padding, *convolution.dilation),
        values.shape[0],
    )
    grid = (-(-pixels // TILES[tile].pixels), -(-rows // TILES[tile].rows))
    kernel.launch(grid, TILES[tile].threads, (x, values, metadata, bias, residual, out, shape))
    return out


@functools.cache
def _kernel(options: tuple[str, ...], device: int, shared_bytes: int) -> driver.Kernel:
    return driver.Kernel(_machine_code(options, driver.architecture(device)), "conv", device, shared_bytes)
