"""Split images into their even and odd rows and columns, for layers with stride 2."""

import ctypes
import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halve.engine.kernels.cpu_sp import threads
from halve.engine.kernels.cpu_sp.assembler import (
    R8,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    RAX,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    Assembler,
    Memory,
)
from halve.engine.kernels.cpu_sp.memory import Executable

_VECTOR = 64  # bytes
_SMALL = 1 << 16  # bytes that are not worth a second thread
_FIELDS = (
    *("counter", "items", "table", "x", "out", "row_step", "out_step", "odd_distance"),
    *("chunks", "first_mask", "second_mask", "even_mask", "odd_mask", "places"),
)


def _field(name: str) -> Memory:
    return Memory(R15, 8 * _FIELDS.index(name))


def split_rows(
    x: Tensor, out: Tensor, rows: npt.NDArray[np.int64], width: int, *, row_step: int, out_step: int, odd_distance: int
) -> None:
    """Copy rows: even columns to `target`, odd columns `odd_distance` bytes behind it (nowhere if that is 0).

    Args:
        x: where rows come from, of 2 or 4 bytes per number.
        out: where they go.
        rows: (count, 3): the first of several rows in x, and in the output, in bytes; and their number.
        width: columns of a row of x.
        row_step: bytes from a row to the next.
        out_step: bytes from a row to the next in the output.
        odd_distance: bytes from the even to the odd columns of a row in the output.
    """
    lanes = _VECTOR // x.element_size()
    chunks, rest = divmod(width, 2 * lanes)
    masks = (min(rest, lanes), max(0, rest - lanes), (rest + 1) // 2, rest // 2)
    call = (ctypes.c_int64 * len(_FIELDS))(
        *(0, len(rows), rows.ctypes.data, x.data_ptr(), out.data_ptr(), row_step, out_step, odd_distance),
        *(chunks, *((1 << count) - 1 for count in masks), _places(lanes).ctypes.data),
    )
    small = x.numel() * x.element_size() < _SMALL
    threads.run(_splitter(x.element_size()).address, ctypes.addressof(call), 1 if small else torch.get_num_threads())


@functools.cache
def _places(lanes: int) -> npt.NDArray[np.generic]:
    """Where the even and then the odd numbers of two vectors are."""
    kind = np.uint32 if lanes == 16 else np.uint16
    return np.concatenate([np.arange(0, 2 * lanes, 2), np.arange(1, 2 * lanes, 2)]).astype(kind)


@functools.cache
def _splitter(size: int) -> Executable:
    """The function that threads run, for numbers of this many bytes."""
    saved = (RBX, R12, R13, R14, R15)
    first, second, even, odd = 1, 2, 3, 4  # masks, and vectors
    even_places, odd_places = 5, 6
    a = Assembler()
    for register in saved:
        a.push(register)
    a.mov(R15, RDI)
    a.load(RAX, _field("places"))
    a.load_vector(even_places, Memory(RAX, 0))
    a.load_vector(odd_places, Memory(RAX, _VECTOR))
    for mask, name in ((first, "first_mask"), (second, "second_mask"), (even, "even_mask"), (odd, "odd_mask")):
        a.load(RAX, _field(name))
        a.set_mask(mask, RAX)
    a.load(R10, _field("row_step"))
    a.load(R11, _field("out_step"))
    a.load(R12, _field("odd_distance"))

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

    top = len(a.code)
    a.mov_immediate(RAX, 1)
    a.fetch_and_add(_field("counter"), RAX)
    a.compare(RAX, _field("items"))
    done = a.jump_forward("ae")
    a.load_address(RAX, Memory(RAX, 0, RAX, 2))
    a.shift_left(RAX, 3)
    a.add(RAX, _field("table"))
    a.load(RSI, Memory(RAX, 0))
    a.add(RSI, _field("x"))
    a.load(RDI, Memory(RAX, 8))
    a.add(RDI, _field("out"))
    a.load(R8, Memory(RAX, 16))
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
    a.decrement(R8)
    a.jump_back(row, "ne")
    a.jump_back(top)
    a.land(done)
    a.leave_vectors()
    for register in reversed(saved):
        a.pop(register)
    a.ret()
    return Executable(np.frombuffer(bytes(a.code), np.uint8))
