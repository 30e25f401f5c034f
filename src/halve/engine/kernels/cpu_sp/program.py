"""Programs: the machine code of a layer and its weights, ready to run.

Layers with equal patterns share code. A program lives as long as the packed weights it was made from.
"""

import hashlib
import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from halve.engine.kernels.cpu_sp.arithmetic import LINE, Arithmetic
from halve.engine.kernels.cpu_sp.emit import LINES_AHEAD, Shape, emit_block
from halve.engine.kernels.cpu_sp.features import ARITHMETICS, AVX512, DTYPES
from halve.engine.kernels.cpu_sp.geometry import Geometry, copied_planes, geometry
from halve.engine.kernels.cpu_sp.memory import Block, Executable, empty
from halve.engine.kernels.cpu_sp.packing import Packed, packed_shapes, places_of
from halve.engine.kernels.cpu_sp.worker import Operand, Phase, Schedule, spans
from halve.engine.kernels.planes import empty_planes, is_planes
from halve.engine.operations import ACTIVATIONS, Convolution, Linear
from halve.errors import EngineError

MAX_VALUES = 8 << 20  # of a layer: 9 bytes of code each, 6 in bfloat16, 13 with AVX2
_BLOCK_BYTES = 1 << 20  # of code and weights, at most: a block runs many times and should stay in the L2 cache
_BYTES_PER_PRODUCT = 11  # of code and weights
_LEAST_ROWS = 8  # fewer accumulators than this wait for each other
CACHED_BYTES = 1 << 20  # of code and weights: the code of smaller layers stays in the L2 cache, tile after tile
_TILE_BYTES = 128 << 10  # of the input that a tile of such a layer reads: it stays in the cache, block after block
_ITEMS_PER_WORKER = 8
_PARTS = 4  # of a block that several threads share
_SMALL = 100_000  # multiply-adds that are not worth a second thread
_MAX_SHAPES = 64  # input shapes that a program remembers
EMITTED = ("none", "relu")  # activations; others run in PyTorch afterwards


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

    @property
    def size(self) -> int:
        """Bytes of memory that the code takes."""
        return self.memory.size


def row_blocks(rows: int, products: int, most: int) -> list[tuple[int, int]]:
    """Split rows with this many multiply-adds each into blocks of equal size, as few as possible.

    >>> row_blocks(64, 288, 28)
    [(0, 21), (21, 42), (42, 64)]
    >>> len(row_blocks(256, 1152, 28)), len(row_blocks(512, 2304, 28))
    (10, 19)
    """
    fitting = _BLOCK_BYTES // (_BYTES_PER_PRODUCT * products)
    count = -(-rows // max(_LEAST_ROWS, min(most, fitting)))
    return [(first, first + length) for first, length in spans(rows, count)]


class Program:
    """Code and weights of a layer."""

    def __init__(
        self,
        operation: Convolution | Linear,
        packed: Packed,
        bias: Tensor | None,
        scale: Tensor | None = None,
        instructions: str = AVX512,
    ) -> None:
        self.instructions = instructions
        self.operation, self._convolution = operation, operation.convolution
        self._sources = sources_of((*packed, bias, scale))
        self._dtype = packed.values.dtype
        _check_weights(self._convolution, packed, bias, scale)
        arithmetic = self._arithmetic = ARITHMETICS[instructions][self._dtype]
        self._size = arithmetic.size
        rows, taps, groups, kept = packed.values.shape
        width = self._convolution.channels // groups
        if packed.codes is None:
            places = np.broadcast_to(np.arange(width), packed.values.shape)
        else:
            places = places_of(packed.codes.numpy())
        values = packed.values.detach()
        if scale is not None:  # of the output channels: part of their weights
            values = (values * scale.detach().float().reshape(-1, 1, 1, 1)).to(self._dtype)
            bias = None if bias is None else bias * scale.detach().float()
        bits = values.contiguous().view(torch.int16 if self._size == 2 else torch.int32)
        vectors, weights = arithmetic.operands(places, bits.numpy())
        self.code = _code_for(arithmetic, vectors, width, kept, self._convolution.activation == "relu")
        self._products = weights.size  # multiply-adds for one vector of pixels
        biases = np.zeros(rows, np.float32) if bias is None else bias.detach().numpy()
        self._weights = Block(4 * (rows + weights.size))
        words, blocks, at = self._weights.bytes.view(np.uint32), [], 0
        for (first, end), function in zip(self.code.bounds, self.code.addresses, strict=True):
            blocks.append((function, self._weights.address + 4 * at, first))
            for part in (biases[first:end].view(np.uint32), weights[first:end].transpose(1, 2, 3, 0).reshape(-1)):
                words[at : at + part.size] = part
                at += part.size
        self._group_lines = self.code.size / (LINE * len(blocks) * taps * groups)
        self._blocks = np.array(blocks, np.int64)
        self._prepared: dict[tuple[object, ...], Prepared] = {}

    @property
    def bytes(self) -> int:
        """The size of code and weights, roughly."""
        return _BYTES_PER_PRODUCT * self._products

    def made_from(self, packed: Packed, bias: Tensor | None, scale: Tensor | None = None) -> bool:
        """Whether the program has these weights: the same tensors, unchanged since."""
        return self._sources == sources_of((*packed, bias, scale))

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run the layer on inputs stored as planes."""
        if x.dtype is not self._dtype or not x.is_cpu or (residual is not None and residual.dtype is not self._dtype):
            raise EngineError(f"the layer computes in {self._dtype} on the CPU, got {x.dtype} on {x.device}")
        strides = None if residual is None else (residual.shape, residual.stride())
        key = (x.shape, x.stride(), strides, torch.get_num_threads())
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= _MAX_SHAPES:
                self._prepared.clear()
            prepared = self._prepared[key] = self.prepare(x, residual)
        storage = empty(prepared.numbers, self._dtype)
        source = x if prepared.copies is None else copied_planes(x, prepared.copies)
        prepared.run(source.data_ptr(), storage.data_ptr(), 0 if residual is None else residual.data_ptr())
        y = storage.as_strided(prepared.shape, prepared.strides)
        if self.operation.activation not in EMITTED:
            ACTIVATIONS[self.operation.activation].aten.overloadpacket.out(y, out=y)  # in place, in this layout
        return y

    def prepare(self, x: Tensor, residual: Tensor | None) -> "Prepared":
        """How to run on inputs like these."""
        channel_dim = self.operation.channel_dim
        shape = _checked_shape(self.operation, x, residual)
        out = empty_planes(shape, channel_dim, self._dtype, torch.device("meta"))
        window = self.window(x.shape)
        pitch = x.stride(channel_dim)
        if not window.direct:
            copied = (x.shape[0], x.shape[1] * len(window.planes), *window.out)
            pitch = empty_planes(copied, 1, self._dtype, torch.device("meta")).stride(1)
        phase = self.phase(
            window,
            Operand(0, pitch=self._size * pitch),
            Operand(1, pitch=self._size * out.stride(channel_dim)),
            None if residual is None else Operand(2, pitch=self._size * residual.stride(channel_dim)),
            torch.get_num_threads(),
        )
        workers = torch.get_num_threads() if self._worthwhile(window) else 1
        numbers = out.stride(channel_dim) * self.operation.rows
        schedule = Schedule([phase], self._arithmetic.vector_bytes, workers)
        return Prepared(schedule, None if window.direct else window, numbers, tuple(shape), out.stride())

    def window(self, shape: Sequence[int]) -> Geometry:
        """How the layer reads an input of this shape."""
        if self.operation.channel_dim == 1:
            return geometry(self._convolution, shape[0], shape[2], shape[3], self._arithmetic.lanes)
        return geometry(self._convolution, 1, math.prod(shape[:-1]), 1, self._arithmetic.lanes)

    def phase(self, window: Geometry, x: Operand, out: Operand, residual: Operand | None, workers: int) -> Phase:
        """The layer on planes of x."""
        distances = np.array(window.plane_of) * self._convolution.channels * x.pitch
        distances += self._size * np.array(window.shifts)
        items = self._items(window, workers if self._worthwhile(window) else 1)
        return Phase(
            self._blocks,
            items,
            window.masks,
            distances.astype(np.int64),
            x,
            out,
            residual,
            code_step=LINE * min(LINES_AHEAD, math.ceil(self._group_lines / items[:, 2].max())),
            constants=self._arithmetic.constants,
            kept=(self,),
        )

    def _worthwhile(self, window: Geometry) -> bool:
        """Whether several threads are worth their while."""
        return self._products * window.vectors > _SMALL

    def _items(self, window: Geometry, workers: int) -> npt.NDArray[np.int32]:
        """The items of work, in the order in which threads take them."""
        blocks, channels = range(len(self._blocks)), self._convolution.channels * len(window.planes)
        fitting = _TILE_BYTES // (self._arithmetic.vector_bytes * channels)
        tiles = -(-window.vectors // max(self._arithmetic.least_tile, fitting))
        if self.bytes <= CACHED_BYTES:  # the input of a tile stays in the cache
            if workers > 1:
                tiles = max(tiles, min(-(-_ITEMS_PER_WORKER * workers // len(blocks)), window.vectors))
            items = [(block, first, count) for first, count in spans(window.vectors, tiles) for block in blocks]
        elif self._arithmetic.always_tiles:
            items = [(block, first, count) for block in blocks for first, count in spans(window.vectors, tiles)]
        else:  # the code of a block stays in the cache of one thread; the last blocks are split: all end at once
            tail = min(len(blocks), 2 * workers) if workers > 1 else 0
            parts = spans(window.vectors, min(_PARTS, window.vectors))
            items = [(block, 0, window.vectors) for block in blocks[: len(blocks) - tail]]
            items += [(block, first, count) for block in blocks[len(blocks) - tail :] for first, count in parts]
        table = np.array(items, np.int32)
        following = np.minimum(np.arange(len(items)) + workers, len(items) - 1)
        return np.column_stack([table, table[following, 0]])


class Prepared(NamedTuple):
    """How to run on inputs of one shape."""

    run: Schedule
    copies: Geometry | None  # None if the input is read where it is
    numbers: int  # of the output, with the space between its planes
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_NONE: tuple[object, list[Program]] = (None, [])
_codes: "weakref.WeakValueDictionary[bytes, Code]" = weakref.WeakValueDictionary()
_programs: dict[int, tuple[object, list[Program]]] = {}  # by the id of the packed values: a weak reference, programs
_lock = threading.Lock()


def known_program(
    operation: Convolution | Linear,
    packed: Packed,
    bias: Tensor | None,
    scale: Tensor | None = None,
    instructions: str = AVX512,
) -> Program | None:
    """The program of packed weights that have not changed since it was made. Runs before every layer."""
    for program in _programs.get(id(packed.values), _NONE)[1]:
        same = program.operation is operation or program.operation == operation
        if same and program.instructions == instructions and program.made_from(packed, bias, scale):
            return program
    return None


def program_for(
    operation: Convolution | Linear,
    packed: Packed,
    bias: Tensor | None,
    scale: Tensor | None = None,
    instructions: str = AVX512,
) -> Program:
    """The program of packed weights. Emits code on first use, and again if the weights have changed."""
    with _lock:
        found = known_program(operation, packed, bias, scale, instructions)
        if found is not None:
            return found
        program, key = Program(operation, packed, bias, scale, instructions), id(packed.values)
        reference = WeakIdRef(packed.values, lambda _: _programs.pop(key, None))
        known = _programs.get(key, _NONE)[1]
        others = [one for one in known if (one.operation, one.instructions) != (operation, instructions)]
        _programs[key] = reference, [*others, program]
        return program


def sources_of(tensors: Iterable[Tensor | None]) -> tuple[object, ...]:
    """What identifies weights: the tensors, and how often they were written to."""
    found: list[object] = []
    for tensor in tensors:
        if tensor is not None:
            found += [tensor.data_ptr(), None if tensor.is_inference() else tensor._version]
    return tuple(found)


def _code_for(arithmetic: Arithmetic, vectors: npt.NDArray[np.uint8], width: int, kept: int, relu: bool) -> Code:
    about = repr((type(arithmetic).__name__, vectors.shape, width, kept, relu))
    key = hashlib.sha256(about.encode() + vectors.tobytes()).digest()
    found = _codes.get(key)
    if found is None:
        found = _codes[key] = Code(arithmetic, vectors, width, kept, relu)
    return found


def _check_weights(convolution: Convolution, packed: Packed, bias: Tensor | None, scale: Tensor | None) -> None:
    """Raise `EngineError` if these are not the weights of the layer."""
    if packed.values.dtype not in DTYPES:
        raise EngineError(f"the weight must be {' or '.join(map(str, DTYPES))}, got {packed.values.dtype}")
    if convolution.groups != 1:
        raise EngineError(f"the layer must have one group, got {convolution.groups}")
    if packed.values.numel() > MAX_VALUES:
        raise EngineError(f"the layer must have at most {MAX_VALUES:,} packed values, got {packed.values.numel():,}")
    values, codes = packed_shapes(convolution.weight_shape, sparse=packed.codes is not None)
    for name, tensor, dtype, shape in (
        ("values", packed.values, packed.values.dtype, values),
        ("codes", packed.codes, torch.uint8, codes),
        ("bias", bias, torch.float32, (convolution.rows,)),
        ("scale", scale, None if scale is None else scale.dtype, (convolution.rows,)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu):
            raise EngineError(
                f"the {name} of a weight of shape {convolution.weight_shape} must have shape {shape} in {dtype} on the "
                f"CPU, got {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
            )


def _checked_shape(operation: Convolution | Linear, x: Tensor, residual: Tensor | None) -> tuple[int, ...]:
    """The shape of the result. Raises `EngineError` if the code would misread the inputs, or touch other memory."""
    expected = checked_out_shape(operation, x.shape, None if residual is None else residual.shape)
    for name, tensor in (("input", x), ("residual", residual)):
        copied = name == "input" and operation.convolution.stride != (1, 1)
        if tensor is not None and not (tensor.is_cpu and (copied or is_planes(tensor, operation.channel_dim))):
            raise EngineError(
                f"the {name} must be stored as planes on the CPU, got strides {tensor.stride()} on {tensor.device}"
            )
    return expected


def checked_out_shape(
    operation: Convolution | Linear, shape: Sequence[int], residual: Sequence[int] | None
) -> tuple[int, ...]:
    """The shape of the result for inputs of these shapes. Raises `EngineError` if they do not fit the layer."""
    convolution, channel_dim = operation.convolution, operation.channel_dim
    if len(shape) < 1 or (channel_dim == 1 and len(shape) != 4) or shape[channel_dim] != convolution.channels:
        form = f"(N, {convolution.channels}, H, W)" if channel_dim == 1 else f"(..., {convolution.channels})"
        raise EngineError(f"the input must have shape {form}, got {tuple(shape)}")
    if min(*convolution.kernel, *convolution.stride, *convolution.dilation) < 1:
        raise EngineError(f"kernel, stride and dilation must be positive, got {convolution}")
    expected: tuple[int, ...] = tuple(operation.out_shape(shape))
    if min(*expected, *shape) < 1:
        raise EngineError(f"{operation} has no output on an input of shape {tuple(shape)}")
    if residual is not None and tuple(residual) != expected:
        raise EngineError(f"the residual must have the shape of the result, {expected}, got {tuple(residual)}")
    return expected
