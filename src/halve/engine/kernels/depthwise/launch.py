"""Compile and launch the depthwise convolution in its tile sizes."""

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.operations import ACTIVATIONS, Convolution
from halve.errors import EngineError

DTYPES = (torch.float16, torch.bfloat16)
_NHWC = torch.channels_last
_THREADS = 128  # as in conv.cu
_LANE_CHANNELS = 128  # at most so many channels of a pixel are read by one block: 256 bytes
_START_ROWS = 3  # loading the weights takes about as long as computing so many rows


class Tile(NamedTuple):
    """What one thread computes, and how many blocks a multiprocessor is to hold, which limits the registers."""

    vector: int  # channels
    columns: int  # of the result
    blocks: int

    def __str__(self) -> str:
        return f"{self.vector}x{self.columns}"


_TILES = {  # by kernel size and stride; chosen so that weights and sums fit into registers
    (3, 1): (Tile(1, 8, 6), Tile(2, 4, 5), Tile(2, 7, 4), Tile(4, 4, 3), Tile(8, 2, 2)),
    (3, 2): (Tile(1, 4, 6), Tile(2, 4, 4), Tile(4, 2, 3), Tile(4, 4, 2)),
    (5, 1): (Tile(1, 7, 4), Tile(2, 4, 3), Tile(2, 7, 2), Tile(4, 2, 2)),
    (5, 2): (Tile(1, 4, 4), Tile(2, 2, 4), Tile(2, 4, 3)),
    (7, 1): (Tile(1, 4, 4), Tile(1, 7, 3), Tile(1, 14, 2), Tile(2, 4, 2), Tile(2, 7, 2)),
    (7, 2): (Tile(1, 4, 3), Tile(2, 4, 2)),
}
TILES = {key: {str(tile): tile for tile in tiles} for key, tiles in _TILES.items()}


def supported(convolution: Convolution) -> bool:
    """Whether the kernel computes this convolution.

    >>> supported(Convolution(96, 1, (7, 7), padding=(3, 3), groups=96)), supported(Convolution(96, 96, (7, 7)))
    (True, False)
    """
    kernel, stride = convolution.kernel, convolution.stride
    return (
        convolution.channels == 1
        and convolution.groups == convolution.rows > 1
        and convolution.dilation == (1, 1)
        and kernel[0] == kernel[1]
        and stride[0] == stride[1]
        and (kernel[0], stride[0]) in TILES
    )


def tiles(convolution: Convolution) -> dict[str, Tile]:
    """The tiles for a supported convolution, by name."""
    found = TILES[convolution.kernel[0], convolution.stride[0]]
    return {name: tile for name, tile in found.items() if convolution.rows % tile.vector == 0}


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    convolution: Convolution
    dtype: torch.dtype
    residual: bool
    tile: str

    def options(self) -> tuple[str, ...]:
        """Preprocessor definitions for the compiler."""
        convolution = self.convolution
        if self.dtype not in DTYPES:
            raise EngineError(f"the kernel needs float16 or bfloat16, got {self.dtype}")
        if not supported(convolution):
            raise EngineError(f"the kernel does not support {convolution}")
        if self.tile not in (known := tiles(convolution)):
            raise EngineError(f"unknown tile {self.tile!r}: must be one of {', '.join(known)}")
        if convolution.activation not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise EngineError(f"unknown activation {convolution.activation!r}: must be one of {names}")
        tile = known[self.tile]
        values = {
            "BF16": int(self.dtype == torch.bfloat16),
            "CHANNELS": convolution.rows,
            "KERNEL": convolution.kernel[0],
            "STRIDE": convolution.stride[0],
            "VECTOR": tile.vector,
            "COLUMNS": tile.columns,
            "BLOCKS": tile.blocks,
            "SCALED": int(convolution.scaled),
            "RESIDUAL": int(self.residual),
            "ACTIVATE": f"activate_{convolution.activation}",
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())


class _Shape(ctypes.Structure):
    """`Shape` in conv.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("height", "width", "out_height", "out_width", "pad_h", "pad_w"),
            *("lanes", "strip_rows", "row_strips", "column_strips", "strips"),
        )
    )


class Operands(NamedTuple):
    """The tensors of one launch: on one GPU, images channels last, bias and scale in float32."""

    x: Tensor
    weight: Tensor  # packed
    bias: Tensor | None
    scale: Tensor | None
    residual: Tensor | None


def run(operands: Operands, convolution: Convolution, tile: str) -> Tensor:
    """Launch the kernel on the current stream."""
    x = operands.x
    images, channels, height, width = x.shape
    out_height, out_width = convolution.out_size(height, width)
    if min(out_height, out_width) < 1:
        raise EngineError(f"images of {height} x {width} pixels are smaller than the kernel {convolution.kernel}")
    out = torch.empty((images, channels, out_height, out_width), dtype=x.dtype, device=x.device, memory_format=_NHWC)
    if not out.numel():
        return out
    variant = Variant(convolution, x.dtype, operands.residual is not None, tile)
    options = variant.options()
    vector, columns, _ = tiles(convolution)[tile]
    groups, lanes = split_lanes(channels // vector, vector)
    resident = _resident_blocks(options, x.device.index)
    together, column_strips = _THREADS // lanes, -(-out_width // columns)
    window = -(-convolution.kernel[0] // convolution.stride[0])
    each = strip_rows(out_height, images * column_strips * groups / together, resident, window)
    row_strips = -(-out_height // each)
    strips = images * row_strips * column_strips
    shape = _Shape(
        *(height, width, out_height, out_width, *convolution.padding),
        *(lanes, each, row_strips, column_strips, strips),
    )
    grid = (groups, min(-(-strips // together), max(1, -(-resident // groups))))
    _kernel(options, x.device.index).launch(grid, _THREADS, (*operands, out, shape))
    return out


def split_lanes(vectors: int, vector: int) -> tuple[int, int]:
    """Into how many blocks the channels of a pixel are split, and how many threads of a block share a pixel.

    >>> split_lanes(48, 2), split_lanes(384, 2), split_lanes(100, 2)
    ((1, 48), (6, 64), (2, 50))
    """
    groups = -(-vectors * vector // _LANE_CHANNELS)
    return groups, -(-vectors // groups)


def strip_rows(height: int, blocks: float, resident: int, window: int) -> int:
    """How many rows of the result a thread computes one below the other, so that all of them finish soonest.

    Args:
        height: rows of the result.
        blocks: thread blocks if each thread computes all rows.
        resident: blocks that run at the same time.
        window: rows of the result that share an input row: strips also read rows of their neighbours.

    >>> strip_rows(56, 21, 264, 7), strip_rows(56, 5376, 264, 7)
    (5, 56)
    """

    def time(rows: int) -> float:
        strips = -(-height // rows)
        shared = window - 1 if strips > 1 else 0
        return -(-blocks * strips // resident) * (rows + shared) + _START_ROWS

    return min(range(height, 0, -1), key=time)


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
    return jit.digest(_source(), repr(_TILES))


@functools.cache
def _kernel(options: tuple[str, ...], device: int) -> driver.Kernel:
    return driver.Kernel(_machine_code(options, driver.architecture(device)), "depthwise", device, 0)


@functools.cache
def _resident_blocks(options: tuple[str, ...], device: int) -> int:
    """How many blocks run on a device at the same time."""
    return _kernel(options, device).resident_blocks(_THREADS) * driver.processors(device)
