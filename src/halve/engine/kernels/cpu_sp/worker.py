"""The loop that every thread runs: take the next item of work until none is left.

Each item runs the function of one block of output channels. While it does, it fetches the code of the block that this
thread will probably run next, since code that comes from memory as it is run keeps a processor waiting.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halve.engine.kernels.cpu_sp import threads
from halve.engine.kernels.cpu_sp.assembler import (
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
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

LANES = 16  # pixels in a vector

FIELDS = (
    *("counter", "items", "table", "blocks"),
    *("x", "x_pitch", "out", "out_pitch", "residual", "residual_pitch"),
    *("masks", "mask_bytes", "taps", "constants", "code_step"),
)
"""What a call gives to the code, 8 bytes each. Sizes are in bytes; see `Launch`."""

_Call = ctypes.c_int64 * len(FIELDS)
_X, _OUT, _RESIDUAL = map(FIELDS.index, ("x", "out", "residual"))
_TWICE = np.arange(32, dtype=np.uint16) // 2  # the constants: 0, 0, 1, 1, ..


def field(name: str) -> Memory:
    """Where a function that the worker calls finds a field."""
    return Memory(R15, 8 * FIELDS.index(name))


class Launch:
    """Items of work for inputs of one shape, ready to run on any input of that shape."""

    def __init__(
        self,
        blocks: npt.NDArray[np.int64],
        items: npt.NDArray[np.int32],
        masks: npt.NDArray[np.uint16],
        taps: npt.NDArray[np.int64],
        *,
        size: int,
        pitches: tuple[int, int, int],
        workers: int,
        code_step: int = 0,
    ) -> None:
        """Prepare a launch.

        Args:
            blocks: (count, 3): the address of a function, that of its weights, and its first output channel.
            items: (count, 4): the block, the first vector of pixels, the number of vectors, and the block that is
                probably next.
            masks: (vectors, 1 + taps): the lanes that hold pixels, and those that each tap reads.
            taps: the distance of each tap from the output's pixel, in bytes.
            size: bytes of a number.
            pitches: of input, output and residual, in numbers.
            workers: number of threads.
            code_step: how many bytes of the next block's code each group of channels fetches.
        """
        self._kept = (blocks, items, masks, taps)
        x_pitch, out_pitch, residual_pitch = (size * pitch for pitch in pitches)
        values = {
            "items": len(items),
            "table": items.ctypes.data,
            "blocks": blocks.ctypes.data,
            "x_pitch": x_pitch,
            "out_pitch": out_pitch,
            "residual_pitch": residual_pitch,
            "masks": masks.ctypes.data,
            "mask_bytes": masks.strides[0],
            "taps": taps.ctypes.data,
            "constants": _TWICE.ctypes.data,
            "code_step": code_step,
        }
        self._call = bytes(_Call(*(values.get(name, 0) for name in FIELDS)))
        self._worker, self._workers = _worker(size).address, workers

    def __call__(self, x: int, out: int, residual: int) -> None:
        """Run on tensors at these addresses. `out` is stored as planes of whole vectors; a residual of 0 is none."""
        call = _Call.from_buffer_copy(self._call)  # of this thread: it counts the items that are taken
        call[_X], call[_OUT], call[_RESIDUAL] = x, out, residual
        threads.run(self._worker, ctypes.addressof(call), self._workers)


def spans(count: int, parts: int) -> Sequence[tuple[int, int]]:
    """Split a range evenly: the start and the length of each part.

    >>> spans(10, 3)
    [(0, 3), (3, 3), (6, 4)]
    """
    bounds = [count * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(bounds)]


@functools.cache
def _worker(size: int) -> Executable:
    """The worker for numbers of this many bytes.

    A function that it calls finds, in bytes:

        rbx, r10, r11   the first vector of x, its pitch, and three times its pitch
        rdx, r12        the first vector of the block's first channel in the output, and the pitch
        rcx, r13        the same in the residual
        r8, r9          the number of vectors, and the masks of the first one
        r14, rbp, rax   the taps, the weights, and code to fetch ahead
        r15             the fields of the call, which the function must keep
    """
    saved = (RBX, RBP, R12, R13, R14, R15)
    a = Assembler()
    for register in saved:
        a.push(register)
    a.mov(R15, RDI)
    top = len(a.code)
    a.mov_immediate(RAX, 1)
    a.fetch_and_add(field("counter"), RAX)
    a.compare(RAX, field("items"))
    done = a.jump_forward("ae")
    a.shift_left(RAX, 4)
    a.add(RAX, field("table"))
    for register, place in ((RSI, 0), (RDI, 4), (R8, 8), (R14, 12)):
        a.load_int32(register, Memory(RAX, place))
    for register in (RSI, R14):  # blocks take 24 bytes each
        a.load_address(register, Memory(register, 0, register, 2))
        a.shift_left(register, 3)
        a.add(register, field("blocks"))
    a.load(RBP, Memory(RSI, 8))
    a.load(RAX, Memory(RSI, 16))
    a.load(R10, field("x_pitch"))
    a.load_address(R11, Memory(R10, 0, R10, 2))
    a.load(R12, field("out_pitch"))
    a.load(R13, field("residual_pitch"))
    for pointer, pitch, name in ((RDX, R12, "out"), (RCX, R13, "residual")):
        a.mov(pointer, RAX)
        a.multiply(pointer, pitch)
        a.add(pointer, field(name))
    a.mov(R9, RDI)
    a.multiply(R9, field("mask_bytes"))
    a.add(R9, field("masks"))
    a.load(RBX, field("x"))
    a.shift_left(RDI, (size * LANES).bit_length() - 1)
    for pointer in (RBX, RDX, RCX):
        a.add(pointer, RDI)
    a.load(RAX, Memory(R14, 0))
    a.load(R14, field("taps"))
    a.call(Memory(RSI, 0))
    a.jump_back(top)
    a.land(done)
    a.leave_vectors()
    for register in reversed(saved):
        a.pop(register)
    a.ret()
    return Executable(np.frombuffer(bytes(a.code), np.uint8))
