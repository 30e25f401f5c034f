"""Split images into their even and odd rows and columns, for layers with stride 2."""

import functools

import numpy as np
import numpy.typing as npt

from halve.engine.kernels.cpu_sp.assembler import (
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    RAX,
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    Assembler,
    Memory,
)
from halve.engine.kernels.cpu_sp.memory import Executable
from halve.engine.kernels.cpu_sp.worker import LANES, Operand, Phase, spans

_VECTOR = 64  # bytes
_SMALL = 1 << 16  # bytes that are not worth a second thread
_ITEMS_PER_WORKER = 8
_FIELDS = (
    *("row_step", "out_step", "odd_distance", "chunks"),
    *("first_mask", "second_mask", "even_mask", "odd_mask", "places"),
)


def _field(name: str) -> Memory:
    return Memory(R14, 8 * _FIELDS.index(name))


def split_phase(
    rows: npt.NDArray[np.int64],
    x: Operand,
    out: Operand,
    *,
    size: int,
    width: int,
    out_step: int,
    odd_distance: int,
    workers: int,
) -> Phase:
    """Copy rows: even columns to their target, odd columns `odd_distance` bytes behind it (nowhere if that is 0).

    Args:
        rows: (count, 3): the first of several rows in x, every other one of which is copied, and in the output, in
            bytes; and their number.
        x: where rows come from.
        out: where they go.
        size: bytes of a number: 2 or 4.
        width: columns of a row of x.
        out_step: bytes from a row to the next in the output.
        odd_distance: bytes from the even to the odd columns of a row in the output.
        workers: number of threads.
    """
    lanes = _VECTOR // size
    chunks, rest = divmod(width, 2 * lanes)
    masks = ((1 << count) - 1 for count in (min(rest, lanes), max(0, rest - lanes), (rest + 1) // 2, rest // 2))
    places = _places(lanes)
    fields = np.array([2 * size * width, out_step, odd_distance, chunks, *masks, places.ctypes.data], np.int64)
    table = np.zeros((len(rows), size * LANES // 8), np.int64)  # as far apart as vectors of pixels
    table[:, :3] = rows
    copied = int(rows[:, 2].sum()) * width * size
    parts = spans(len(table), min(len(table), _ITEMS_PER_WORKER * workers if workers > 1 and copied > _SMALL else 1))
    items = np.array([(0, first, count, 0) for first, count in parts], np.int32)
    blocks = np.array([[_splitter(size).address, table.ctypes.data, 0]], np.int64)
    return Phase(blocks, items, np.zeros((1, 1), np.uint16), fields, x, out, kept=(table, places))


@functools.cache
def _places(lanes: int) -> npt.NDArray[np.generic]:
    """Where the even and then the odd numbers of two vectors are."""
    kind = np.uint32 if lanes == 16 else np.uint16
    return np.concatenate([np.arange(0, 2 * lanes, 2), np.arange(1, 2 * lanes, 2)]).astype(kind)


@functools.cache
def _splitter(size: int) -> Executable:
    """Split rows of numbers of this many bytes: r8 entries of the table at rbp, the first at a distance of rdi."""
    first, second, even, odd = 1, 2, 3, 4  # masks, and vectors
    even_places, odd_places = 5, 6
    a = Assembler()
    a.load(RAX, _field("places"))
    a.load_vector(even_places, Memory(RAX, 0))
    a.load_vector(odd_places, Memory(RAX, _VECTOR))
    for mask, name in ((first, "first_mask"), (second, "second_mask"), (even, "even_mask"), (odd, "odd_mask")):
        a.load(RAX, _field(name))
        a.set_mask(mask, RAX)
    a.load(R10, _field("row_step"))
    a.load(R11, _field("out_step"))
    a.load(R12, _field("odd_distance"))
    a.add(RBP, RDI)
    a.mov(R9, RBX)
    a.subtract(R9, RDI)  # x
    a.mov(R13, RDX)
    a.subtract(R13, RDI)  # the output

    def move(memory_first: Memory, memory_second: Memory, *, whole: bool) -> None:
        """Split two vectors; at the end of a row, within the masks."""
        a.load_numbers(size, first, memory_first, 0 if whole else first)
        a.load_numbers(size, second, memory_second, 0 if whole else second)
        for target, places, mask in ((even, even_places, even), (odd, odd_places, odd)):
            a.copy_vector(target, first)
            a.select_from_two(size, target, places, second)
            if target == odd:
                a.compare_zero(_field("odd_distance"))
                skip = a.jump_forward("e")
                a.store_numbers(size, Memory(RDX, 0, R12, 1), target, 0 if whole else mask)
                a.land(skip)
            else:
                a.store_numbers(size, Memory(RDX), target, 0 if whole else mask)

    entry = len(a.code)
    a.load(RSI, Memory(RBP, 0))
    a.add(RSI, R9)
    a.load(RDI, Memory(RBP, 8))
    a.add(RDI, R13)
    a.load(RAX, Memory(RBP, 16))
    row = len(a.code)
    a.mov(RBX, RSI)
    a.mov(RDX, RDI)
    a.load(RCX, _field("chunks"))
    a.compare_zero(_field("chunks"))
    no_chunks = a.jump_forward("e")
    chunk = len(a.code)
    move(Memory(RBX), Memory(RBX, _VECTOR), whole=True)
    a.add_immediate(RBX, 2 * _VECTOR)
    a.add_immediate(RDX, _VECTOR)
    a.decrement(RCX)
    a.jump_back(chunk, "ne")
    a.land(no_chunks)
    a.compare_zero(_field("even_mask"))
    no_rest = a.jump_forward("e")
    move(Memory(RBX), Memory(RBX, _VECTOR), whole=False)
    a.land(no_rest)
    a.add(RSI, R10)
    a.add(RDI, R11)
    a.decrement(RAX)
    a.jump_back(row, "ne")
    a.add_immediate(RBP, size * LANES)
    a.decrement(R8)
    a.jump_back(entry, "ne")
    a.ret()
    return Executable(np.frombuffer(bytes(a.code), np.uint8))
