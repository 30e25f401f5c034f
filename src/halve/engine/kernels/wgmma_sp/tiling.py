"""How a layer is split into tiles, and what of it fits into shared memory."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from halve.engine.kernels.wgmma_sp.packing import BLOCK_BYTES, SIDE, taps
from halve.engine.operations import Convolution

SHARED_BYTES = 227 * 1024  # of a thread block on compute capability 9.0
_HALF_SHARED_BYTES = 113 * 1024  # of each of two
MAX_TAPS = 49  # as in conv.cu
_PIXEL_BYTES = 2 * SIDE  # of the channels of one chunk
_MAX_BOX = 256  # elements of a box along one dimension


@dataclass(frozen=True)
class Tile:
    """What a thread block computes at once: output channels by up to `pixels` pixels, by two warpgroups."""

    blocks: int  # of 64 output channels, per warpgroup
    pixels: int  # at most; images have rows of any length
    own: bool = False  # each warpgroup has its own boxes of pixels, instead of its own output channels
    split: int = 1  # thread blocks that share the tile, and split the input channels
    light: bool = False  # two thread blocks fit on a multiprocessor
    unrolled: bool = False  # the compiler knows the taps, which are those of a 3x3 window
    halves: bool = False  # the warpgroups share the tile, and split the input channels

    @property
    def channels(self) -> int:
        return SIDE * self.blocks * (1 if self.own else 2)

    def __str__(self) -> str:
        split = f"k{self.split}" if self.split > 1 else ""
        kind = " halves" if self.halves else " own" * self.own
        return f"{self.channels}x{self.pixels}{split}{kind}" + " light" * self.light + " 3x3" * self.unrolled

    @property
    def summers(self) -> int:
        """The warpgroups that split the input channels."""
        return self.split * (2 if self.halves else 1)


_TILES = (
    Tile(1, 256),
    Tile(1, 192),
    Tile(1, 128),
    Tile(1, 64),
    Tile(2, 128),
    Tile(1, 256, own=True),
    Tile(1, 128, own=True),
    Tile(2, 64, own=True),
    *(Tile(1, 128, split=split) for split in (2, 4, 8)),
    *(Tile(1, 64, split=split, light=True) for split in (1, 2, 4, 8)),
    Tile(1, 96, light=True),
    Tile(1, 64, own=True, light=True),
    Tile(1, 96, own=True, light=True),
    Tile(1, 128, own=True, halves=True),
    Tile(1, 64, own=True, halves=True, light=True),
    Tile(4, 64, own=True),
)
TILES = {str(tile): tile for tile in (*_TILES, *(replace(tile, unrolled=True) for tile in _TILES if tile.blocks == 1))}


class Shortcut(NamedTuple):
    """A 1x1 convolution of a second input, which is added."""

    channels: int
    stride: int


@dataclass(frozen=True)
class Tiling:
    """A layer on images of one size, split into tiles. Fields are named as in conv.cu."""

    tile: Tile
    pixels: int  # of a tile, including margins between rows; a multiple of 8
    parts: int
    stages: int
    resident: bool
    flat: bool
    tile_rows: int
    tile_images: int
    tiles_per_image: int
    pixel_tiles: int
    row_tiles: int
    pitch: int
    box: tuple[int, int, int]  # columns, images and rows that are loaded
    stored: tuple[int, int, int]  # columns, images and rows that are stored
    shortcut_box: tuple[int, int, int]  # those that are loaded of the second input
    planes: int
    begins: int
    shifts: tuple[int, ...]
    box_pixels: int
    slot_bytes: int
    stage_bytes: int
    stored_bytes: int
    pixel_slots: int
    weight_slots: int
    staging: int
    weights: int
    exchange: int
    next_weights: int
    next_staging: int
    barriers: int
    shared_bytes: int
    lag: int
    ahead: bool  # residuals are loaded while products run
    grid: int  # thread blocks


def supported(convolution: Convolution) -> bool:
    """Whether the kernel can run the convolution on images of some size."""
    stride, dilation, kernel = convolution.stride[0], convolution.dilation, convolution.kernel
    return (
        convolution.groups == 1
        and convolution.channels % 8 == convolution.rows % 8 == 0  # copies are multiples of 16 bytes
        and convolution.stride in ((1, 1), (2, 2))
        and math.prod(kernel) <= MAX_TAPS
        and (stride == 1 or (dilation == (1, 1) and (kernel == (1, 1) or min(kernel) > 1)))
    )


def tiling(
    convolution: Convolution,
    size: tuple[int, int, int],
    tile: Tile,
    *,
    sparse: bool,
    residual: bool,
    processors: int,
    shortcut: Shortcut | None = None,
    next_rows: int = 0,
) -> Tiling | None:
    """Split a supported convolution on images of a size (images, height, width) into tiles; None if it does not fit.

    Tiles that thread blocks share are for layers with few tiles: they do not fit if there are enough.

    >>> conv = Convolution(128, 128, (3, 3), padding=(1, 1))
    >>> found = tiling(conv, (256, 28, 28), Tile(1, 256), sparse=True, residual=False, processors=132)
    >>> found.tile_rows, found.pitch, found.pixels, found.pixel_tiles
    (7, 29, 208, 1024)
    """
    flat = convolution.pointwise and (shortcut is None or shortcut.stride == 1)
    split = _flat(size, tile) if flat else _rows(convolution, size, tile)
    return None if split is None else _fit(convolution, split, tile, sparse, residual, processors, shortcut, next_rows)


@dataclass(frozen=True)
class _Split:
    pixels: int
    tile_rows: int
    tile_images: int
    tiles_per_image: int
    pixel_tiles: int
    pitch: int
    box: tuple[int, int, int]
    stored: tuple[int, int, int]
    flat: bool = False


def _flat(size: tuple[int, int, int], tile: Tile) -> _Split:
    tiles = -(-math.prod(size) // tile.pixels)
    part = tile.pixels // _parts(tile, flat=True)
    return _Split(tile.pixels, 1, 1, tiles, tiles, 0, (tile.pixels, 1, 1), (part, 1, 1), flat=True)


def _rows(convolution: Convolution, size: tuple[int, int, int], tile: Tile) -> _Split | None:
    images, height, width = size
    out_height, out_width = convolution.out_size(height, width)
    stride, dilation = convolution.stride[0], convolution.dilation
    if stride == 1:  # the margin behind a row is the one before the next
        pitch, halo = width + convolution.padding[1], (convolution.kernel[0] - 1) * dilation[0]
    else:
        pitch, halo = out_width + (convolution.kernel[1] - 1) // 2, (convolution.kernel[0] - 1) // 2

    def needed(lines: int) -> int:  # pixels up to the last that counts
        return _rounded((lines - 1) * pitch + out_width)

    if min(out_height, out_width) < 1 or pitch < out_width or needed(1) > tile.pixels:
        return None
    rows = max(rows for rows in range(1, out_height + 1) if needed(rows) <= tile.pixels)
    together = max(1, *(count for count in range(images + 1) if needed(count * out_height) <= tile.pixels))
    tiles = -(-out_height // rows)
    rows = -(-out_height // tiles)  # tiles of equal height
    box, stored = (pitch, together, rows + halo), (pitch, together, rows)
    if max(box[0] * stride, box[1], box[2] * stride) > _MAX_BOX:
        return None
    return _Split(needed(rows * together), rows, together, tiles, -(-images // together) * tiles, pitch, box, stored)


def _fit(
    convolution: Convolution,
    split: _Split,
    tile: Tile,
    sparse: bool,
    residual: bool,
    processors: int,
    shortcut: Shortcut | None,
    next_rows: int,
) -> Tiling | None:
    order, stride, dilation = taps(convolution), convolution.stride[0], convolution.dilation
    line = split.pitch * split.tile_images  # from one row to the next
    shifts = [row // stride * dilation[0] * line + column // stride * dilation[1] for row, column in order]
    planes = [(row % stride, column % stride) for row, column in order]
    begins = sum(1 << i for i, plane in enumerate(planes) if i == 0 or plane != planes[i - 1])
    box_pixels, stored_pixels = math.prod(split.box), math.prod(split.stored)
    shortcut_box = (split.pixels, 1, 1) if split.flat else split.stored
    if shortcut is not None and max(shortcut_box[0], shortcut_box[2]) * shortcut.stride > _MAX_BOX:
        return None
    if tile.unrolled and (shortcut is not None or not _plain(convolution)):
        return None
    in_place = _in_place(tile)
    if in_place and split.pixels > box_pixels and max(shifts) > 0:
        return None  # storing would write to the margin behind the box
    slot = _rounded(max(box_pixels, split.pixels + max(shifts), stored_pixels)) * _PIXEL_BYTES
    parts = _parts(tile, split.flat)
    whole = residual or next_rows > 0 or tile.summers > 1  # a tile is in shared memory at once
    stages = 0 if in_place else tile.blocks * parts if whole else min(2, tile.blocks * parts)
    stage_bytes = _rounded(max(split.pixels // parts, stored_pixels)) * _PIXEL_BYTES
    chunks, added = -(-convolution.channels // SIDE), 0 if shortcut is None else -(-shortcut.channels // SIDE)
    steps = chunks * len(order) + added
    row_tiles = -(-convolution.rows // tile.channels)
    exchanged = 0
    if tile.summers > 1:
        if chunks + added < tile.summers:
            return None
        if tile.split > 1 and split.pixel_tiles * row_tiles * tile.split > processors * (1 + tile.light):
            return None
        finished = -(-split.pixels // 8 // tile.summers)  # groups of 8 pixels that a warpgroup finishes
        stage_bytes = max(stage_bytes, tile.summers * finished * 8 * _PIXEL_BYTES // parts)
        senders = 2 if tile.halves else 2 * (tile.split - 1)  # warpgroups
        exchanged = senders * finished * 8 * SIDE * 4
    weight_bytes = tile.blocks * BLOCK_BYTES[sparse]
    next_blocks = next_rows // SIDE
    next_stored, next_weight_bytes = 2 * next_blocks * stage_bytes, next_blocks * weight_bytes
    available = _HALF_SHARED_BYTES if tile.light else SHARED_BYTES
    staged = (1 if tile.halves else 2) * stages * stage_bytes
    left = available - staged - exchanged - next_stored - next_weight_bytes - 1024  # for barriers
    rings = 2 if tile.own else 1

    def boxes(count: int) -> int:  # that the first steps of a tile read
        return sum(begins >> step % len(order) & 1 for step in range(min(count, steps)))

    slots_needed = 2
    resident_bytes = steps * (weight_bytes + 16) + 2 * slots_needed * slot
    resident = tile.own and not tile.halves and row_tiles <= processors and resident_bytes <= left
    if next_rows and not (resident and split.flat and convolution.rows == tile.channels and next_rows % SIDE == 0):
        return None  # a warpgroup needs all channels of its pixels, and all weights
    if resident:
        pixel_slots, weight_slots = min(6, (left - steps * (weight_bytes + 16)) // (2 * slot)), steps
    else:
        for pixel_slots, weight_slots in _slots(tile):
            if rings * pixel_slots * slot + 2 * weight_slots * weight_bytes <= left:
                break
        else:
            return None
    tiles = split.pixel_tiles if resident else split.pixel_tiles * row_tiles
    places = processors * (1 + tile.light)
    blocks = min(places // row_tiles if resident else places, tiles)  # those with resident weights stay at one row tile
    staging = rings * pixel_slots * slot
    exchange = staging + staged
    next_staging = exchange + exchanged
    weights = next_staging + next_stored
    weight_rings = 1 if resident else 2
    next_weights = weights + weight_rings * weight_slots * weight_bytes
    barriers = next_weights + next_weight_bytes
    count = 2 * (weight_rings * weight_slots + rings * pixel_slots) + 3
    return Tiling(
        tile=tile,
        pixels=split.pixels,
        parts=parts,
        stages=max(stages, 1),
        resident=resident,
        flat=split.flat,
        tile_rows=split.tile_rows,
        tile_images=split.tile_images,
        tiles_per_image=split.tiles_per_image,
        pixel_tiles=split.pixel_tiles,
        row_tiles=row_tiles,
        pitch=split.pitch,
        box=split.box,
        stored=split.stored,
        shortcut_box=shortcut_box,
        planes=begins.bit_count(),
        begins=begins,
        shifts=tuple(shifts),
        box_pixels=box_pixels,
        slot_bytes=slot,
        stage_bytes=stage_bytes,
        stored_bytes=stored_pixels * _PIXEL_BYTES,
        pixel_slots=pixel_slots,
        weight_slots=weight_slots,
        staging=staging,
        weights=weights,
        exchange=exchange,
        next_weights=next_weights,
        next_staging=next_staging,
        barriers=barriers,
        shared_bytes=barriers + 8 * count,
        lag=min(steps, 4) if len(order) > 1 and boxes(4) <= pixel_slots else 1,
        ahead=residual and in_place and (pixel_slots > 2 or tiles <= 2 * blocks),
        grid=blocks * row_tiles if resident else tiles * tile.split if tile.split > 1 else blocks,
    )


def _slots(tile: Tile) -> list[tuple[int, int]]:
    """Buffers for boxes and for blocks of weights, the best first: a box lasts for nine steps, a block for one."""
    if not tile.unrolled:
        return list(itertools.product((4, 3, 2), (6, 5, 4, 3)))
    return [*itertools.product((3, 2), (8, 7, 6, 5)), *itertools.product((3, 2), (4, 3))]


def _plain(convolution: Convolution) -> bool:
    """Whether the window is one of 3x3 that the kernel can unroll."""
    return (convolution.kernel, convolution.stride, convolution.dilation) == ((3, 3), (1, 1), (1, 1))


def _in_place(tile: Tile) -> bool:
    return tile.own and tile.blocks == 1 and not tile.halves


def _parts(tile: Tile, flat: bool) -> int:
    """Tiles of 1x1 convolutions are stored in parts, which need less shared memory."""
    return max(1, tile.pixels // 64) if flat and tile.blocks == 1 and not tile.own else 1


def _rounded(pixels: int) -> int:
    return -(-pixels // 8) * 8
