"""Programs: the machine code of a layer and its weights, ready to run.

Layers with equal patterns share code. A program lives as long as the packed weights it was made from.
"""

import functools
import hashlib
import math
import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halve.engine.kernels.cpu_sp.arithmetic import Arithmetic, BFloat16, Float32
from halve.engine.kernels.cpu_sp.emit import LINE, LINES_AHEAD, Shape, emit_block
from halve.engine.kernels.cpu_sp.geometry import copied_planes, geometry
from halve.engine.kernels.cpu_sp.memory import Block, Executable
from halve.engine.kernels.cpu_sp.packing import Packed, places_of
from halve.engine.kernels.cpu_sp.worker import LANES, launch, spans
from halve.engine.kernels.planes import empty_planes
from halve.engine.operations import Convolution

ARITHMETIC: dict[torch.dtype, Arithmetic] = {torch.float32: Float32(), torch.bfloat16: BFloat16()}
_BLOCK_BYTES = 640 << 10  # of code and weights, at most: a block runs many times and should stay in the L2 cache
_BYTES_PER_PRODUCT = 11  # of code and weights
_LEAST_ROWS = 8  # fewer accumulators than this wait for each other
_TILE_BYTES = 400 << 10  # of the input that a tile reads: it is read once per block
_LEAST_TILE = 16  # vectors
_ITEMS_PER_WORKER = 8
_SMALL = 100_000  # multiply-adds that are not worth a second thread


class Code:
    """The machine code of a layer: one function per block of rows."""

    def __init__(
        self, arithmetic: Arithmetic, vectors: npt.NDArray[np.uint8], width: int, kept: int, relu: bool
    ) -> None:
        rows, taps, groups, products = vectors.shape
        self.bounds = row_blocks(rows, taps * groups * products, arithmetic.max_rows)
        by_row = np.ascontiguousarray(vectors.transpose(1, 2, 3, 0))
        functions = [
            emit_block(arithmetic, Shape(b - a, taps, groups, products, width, kept, relu), by_row[..., a:b])
            for a, b in self.bounds
        ]
        self.memory = Executable(np.concatenate(functions))
        starts = np.cumsum([0, *(len(function) for function in functions)])[:-1]
        self.addresses = [self.memory.address + int(start) for start in starts]


def row_blocks(rows: int, products: int, most: int) -> list[tuple[int, int]]:
    """Split rows with this many multiply-adds each into blocks of equal size, and into a multiple of four if many.

    >>> row_blocks(64, 288, 28)
    [(0, 21), (21, 42), (42, 64)]
    >>> len(row_blocks(256, 1152, 28)), len(row_blocks(512, 2304, 28))
    (12, 20)
    """
    fitting = _BLOCK_BYTES // (_BYTES_PER_PRODUCT * products)
    count = -(-rows // max(_LEAST_ROWS, min(most, fitting)))
    if count > 4:
        count = min(-(-count // 4) * 4, rows)
    return [(first, first + length) for first, length in spans(rows, count)]


class Program:
    """Code and weights of a layer."""

    def __init__(self, packed: Packed, bias: Tensor | None, width: int, relu: bool) -> None:
        self._arithmetic = ARITHMETIC[packed.values.dtype]
        rows, taps, groups, kept = packed.values.shape
        if packed.codes is None:
            places = np.broadcast_to(np.arange(width), packed.values.shape)
        else:
            places = places_of(packed.codes).numpy()
        bits = packed.values.detach().contiguous().view(torch.int16 if self._arithmetic.size == 2 else torch.int32)
        vectors, weights = self._arithmetic.operands(places, bits.numpy())
        self._code = _code_for(self._arithmetic, vectors, width, kept, relu)
        self.products = weights.size  # multiply-adds for one vector of pixels
        biases = np.zeros(rows, np.float32) if bias is None else bias.detach().numpy()
        self._weights = Block(4 * (rows + weights.size))
        words, blocks, at = self._weights.bytes.view(np.uint32), [], 0
        for (first, end), function in zip(self._code.bounds, self._code.addresses, strict=True):
            blocks.append((function, self._weights.address + 4 * at, first))
            for part in (biases[first:end].view(np.uint32), weights[first:end].transpose(1, 2, 3, 0).reshape(-1)):
                words[at : at + part.size] = part
                at += part.size
        self._group_lines = self._code.memory.size / (LINE * len(blocks) * taps * groups)
        self._blocks = np.array(blocks, np.int64)
        self._scheduled = functools.lru_cache(64)(self._schedule)

    @property
    def code_bytes(self) -> int:
        return self._code.memory.size

    def run(self, x: Tensor, residual: Tensor | None, convolution: Convolution) -> Tensor:
        """Run the layer on images stored as planes."""
        images, _, height, width = x.shape
        shape = geometry(convolution, images, height, width)
        source = x if shape.direct else copied_planes(x, shape)
        out = empty_planes((images, convolution.rows, *shape.out), 1, x.dtype, x.device)
        workers = torch.get_num_threads() if self.products * shape.vectors > _SMALL else 1
        items, taps, step = self._scheduled(convolution, images, height, width, source.stride(1), workers)
        launch(self._blocks, items, shape.masks, taps, source, out, residual, workers=workers, code_step=step)
        return out

    def _schedule(
        self, convolution: Convolution, images: int, height: int, width: int, pitch: int, workers: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], int]:
        """The items of work in the order in which threads take them, the taps, and how fast to fetch code."""
        shape, size = geometry(convolution, images, height, width), self._arithmetic.size
        blocks, channels = range(len(self._blocks)), convolution.channels * len(shape.planes)
        fitting = max(_LEAST_TILE, _TILE_BYTES // (size * LANES * channels))
        tiles = -(-shape.vectors // fitting)
        by_tile = tiles > 1
        if workers > 1:
            tiles = max(tiles, min(-(-_ITEMS_PER_WORKER * workers // len(blocks)), shape.vectors))
        parts = spans(shape.vectors, tiles)
        if by_tile:  # the input of a tile stays in the cache, and the code streams
            items = [(block, first, count) for first, count in parts for block in blocks]
        else:
            items = [(block, first, count) for block in blocks for first, count in parts]
        table = np.array(items, np.int32)
        following = np.minimum(np.arange(len(items)) + workers, len(items) - 1)
        table = np.column_stack([table, table[following, 0]])
        distances = np.array(shape.plane_of) * convolution.channels * pitch + np.array(shape.shifts)
        step = LINE * min(LINES_AHEAD, math.ceil(self._group_lines * tiles / shape.vectors))
        return table, (size * distances).astype(np.int64), step


_codes: "weakref.WeakValueDictionary[bytes, Code]" = weakref.WeakValueDictionary()
_programs = WeakIdKeyDictionary()  # packed values -> {relu -> program}
_lock = threading.Lock()


def program_for(packed: Packed, bias: Tensor | None, width: int, relu: bool) -> Program:
    """The program of packed weights. Emits code on first use.

    Args:
        packed: the weights.
        bias: one per row.
        width: input channels in a group.
        relu: whether negative results become zero.
    """
    made = _programs.get(packed.values)
    if made is None or relu not in made:
        with _lock:
            made = _programs.setdefault(packed.values, {})
            if relu not in made:
                made[relu] = Program(packed, bias, width, relu)
    program: Program = made[relu]
    return program


def _code_for(arithmetic: Arithmetic, vectors: npt.NDArray[np.uint8], width: int, kept: int, relu: bool) -> Code:
    about = repr((type(arithmetic).__name__, vectors.shape, width, kept, relu))
    key = hashlib.sha256(about.encode() + vectors.tobytes()).digest()
    found = _codes.get(key)
    if found is None:
        found = _codes[key] = Code(arithmetic, vectors, width, kept, relu)
    return found
