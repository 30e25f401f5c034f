"""The loop that every thread runs: phase after phase, take the next item of work until none is left.

A phase is a layer, or a copy that a layer needs. Each item runs the function of one block of output channels. While it
does, it fetches the code of the block that this thread will probably run next, since code that comes from memory as it
is run keeps a processor waiting. A phase begins when all items of the one before are done: threads count them, so that
any number of threads gets through, also a single one.

An item may also be one image that goes through several phases on its own, in a thread that needs to wait for no other:
what these phases write for each other stays in the cache. Threads have memory of their own for it, a *slot*.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

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
    RSP,
    Assembler,
    Memory,
)
from halve.engine.kernels.cpu_sp.memory import Executable

LANES = 16  # pixels in a vector

_OPERANDS = ("x", "out", "residual")
FIELDS = (
    *("counter", "finished", "items", "table", "blocks"),
    *_OPERANDS,
    *(f"{name}_{distance}" for name in _OPERANDS for distance in ("pitch", "image", "slot")),
    *("masks", "mask_bytes", "taps", "constants", "code_step"),
)
"""What a phase gives to the code, 8 bytes each. Sizes are in bytes; see `Phase`."""

_PHASE_BYTES = 8 * len(FIELDS)
_HEADER = ("slots", "bytes")  # of a call: slots that are taken, and the size of all phases in turn; phases follow
_SPINS = 2000  # looks at the other threads' progress before giving way to other processes
_SCHED_YIELD = 24  # system call
_NONE = np.zeros(1, np.int64)


def field(name: str) -> Memory:
    """Where a function that the worker calls finds a field."""
    return Memory(R15, 8 * FIELDS.index(name))


class Operand(NamedTuple):
    """Where a phase reads or writes: an address that is known when it runs, and distances in bytes."""

    address: int  # which of the addresses of a call
    offset: int = 0
    pitch: int = 0  # from a channel to the next
    image: int = 0  # from an image to the next, for images that go through phases on their own
    slot: int = 0  # from the memory of a thread to that of the next


class Phase(NamedTuple):
    """Items of work that can run at the same time.

    blocks: (count, 3): the address of a function, that of its weights, and its first output channel.
    items: (count, 4): the block, the first vector of pixels, their number, and the block that is probably next.
    masks: (vectors, 1 + taps): the lanes that hold pixels, and those that each tap reads.
    taps: the distance of each tap from the output's pixel, in bytes.
    code_step: how many bytes of the next block's code each group of channels fetches.
    constants: what functions find at the address in the field of this name.
    kept: whatever else must live as long as the phase.
    """

    blocks: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    masks: npt.NDArray[np.uint16]
    taps: npt.NDArray[np.int64]
    x: Operand
    out: Operand
    residual: Operand | None = None
    code_step: int = 0
    constants: npt.NDArray[np.generic] = _NONE
    kept: tuple[object, ...] = ()


class Together(NamedTuple):
    """Phases that each image goes through on its own."""

    phases: Sequence[Phase]
    images: int


class Schedule:
    """Phases for inputs of some shapes, ready to run on any inputs of these shapes."""

    def __init__(self, phases: Sequence[Phase | Together], vector_bytes: int, workers: int) -> None:
        """Prepare phases.

        Args:
            phases: to run one after the other.
            vector_bytes: bytes of a vector of pixels.
            workers: number of threads.
        """
        self._workers = workers
        self._worker, alone = _worker(vector_bytes)
        inner = [phase for one in phases if isinstance(one, Together) for phase in one.phases]
        outer, at = [], 8 * len(_HEADER) + _PHASE_BYTES * len(phases)
        for one in phases:
            outer.append(_images(one, alone, at) if isinstance(one, Together) else one)
            at += _PHASE_BYTES * len(one.phases) if isinstance(one, Together) else 0
        self._phases = [*outer, *inner]  # their arrays must live as long as their addresses are used
        call = [0, _PHASE_BYTES * len(outer), *itertools.chain.from_iterable(map(_values, self._phases))]
        self._call = np.array(call, np.int64)
        places, self._addresses = [], []  # of operands
        for number, phase in enumerate(self._phases):
            for name in _OPERANDS:
                operand = getattr(phase, name)
                if operand is not None:
                    places.append(len(_HEADER) + number * len(FIELDS) + FIELDS.index(name))
                    self._addresses.append(operand.address)

        self._places = np.array(places)

    def __call__(self, *addresses: int) -> None:
        """Run on memory at these addresses. What is written are planes of whole vectors."""
        call = self._call.copy()  # of this thread: it counts the items that are taken
        call[self._places] += np.array(addresses, np.int64)[self._addresses]
        threads.run(self._worker, call.ctypes.data, self._workers)


def _values(phase: Phase) -> list[int]:
    """The fields of a phase."""
    values = {
        "items": len(phase.items),
        "table": phase.items.ctypes.data,
        "blocks": phase.blocks.ctypes.data,
        "masks": phase.masks.ctypes.data,
        "mask_bytes": phase.masks.strides[0],
        "taps": phase.taps.ctypes.data,
        "constants": phase.constants.ctypes.data,
        "code_step": phase.code_step,
    }
    for name in _OPERANDS:
        operand = getattr(phase, name)
        if operand is not None:
            values |= {name: operand.offset, f"{name}_pitch": operand.pitch}
            values |= {f"{name}_image": operand.image, f"{name}_slot": operand.slot}
    return [values.get(name, 0) for name in FIELDS]


def _images(group: Together, alone: int, at: int) -> Phase:
    """A phase whose items are images. Instead of weights, their block has the place and size of the phases."""
    blocks = np.array([[alone, at, _PHASE_BYTES * len(group.phases)]], np.int64)
    images = np.arange(group.images)
    items = np.column_stack([0 * images, 0 * images, images, 0 * images]).astype(np.int32)
    nowhere = Operand(0)
    return Phase(blocks, items, np.zeros((1, 1), np.uint16), np.zeros(1, np.int64), nowhere, nowhere)


def spans(count: int, parts: int) -> Sequence[tuple[int, int]]:
    """Split a range evenly: the start and the length of each part.

    >>> spans(10, 3)
    [(0, 3), (3, 3), (6, 4)]
    """
    bounds = [count * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(bounds)]


_IMAGE, _SLOT, _CALL = Memory(RSP, 8), Memory(RSP, 16), Memory(RSP, 24)  # on the stack of both loops
_COUNTER = _END = Memory(RSP, 0)


@functools.cache
def _code(vector_bytes: int) -> tuple[Executable, int]:
    """The worker for vectors of this many bytes, and the place of the function that runs phases alone.

    A function that it calls finds, in bytes:

        rbx, r10, r11   the first vector of x, its pitch, and three times its pitch
        rdx, r12        the first vector of the block's first channel in the output, and the pitch
        rcx, r13        the same in the residual
        rdi             how far the first vector is from the start of a plane
        r8, r9          the number of vectors, and the masks of the first one
        r14, rbp, rax   the taps, the weights, and code to fetch ahead
        rsi             the block
        r15             the fields of the phase, which the function must keep, as it must the stack
    """
    saved = (RBX, RBP, R12, R13, R14, R15)
    a = Assembler()
    for register in saved:
        a.push(register)
    a.add_immediate(RSP, -32)
    a.store(_CALL, RDI)
    a.mov_immediate(RAX, 1)
    a.fetch_and_add(Memory(RDI, 8 * _HEADER.index("slots")), RAX)
    a.store(_SLOT, RAX)
    a.mov_immediate(RAX, 0)
    a.store(_IMAGE, RAX)
    a.load_address(R15, Memory(RDI, 8 * len(_HEADER)))
    a.load(RAX, Memory(RDI, 8 * _HEADER.index("bytes")))
    a.add(RAX, R15)
    a.store(_END, RAX)

    phase = len(a.code)
    item = len(a.code)
    a.mov_immediate(RAX, 1)
    a.fetch_and_add(field("counter"), RAX)
    a.compare(RAX, field("items"))
    none_left = a.jump_forward("ae")
    _run_item(a, vector_bytes)
    a.mov_immediate(RAX, 1)
    a.fetch_and_add(field("finished"), RAX)
    a.jump_back(item)
    a.land(none_left)

    wait = len(a.code)
    a.mov_immediate(RCX, _SPINS)
    look = len(a.code)
    a.load(RAX, field("finished"))
    a.compare(RAX, field("items"))
    finished = a.jump_forward("ae")
    a.pause()
    a.decrement(RCX)
    a.jump_back(look, "ne")
    a.mov_immediate(RAX, _SCHED_YIELD)
    a.system_call()
    a.jump_back(wait)
    a.land(finished)
    a.add_immediate(R15, _PHASE_BYTES)
    a.compare(R15, _END)
    a.jump_back(phase, "ne")

    a.add_immediate(RSP, 32)
    a.leave_vectors()
    for register in reversed(saved):
        a.pop(register)
    a.ret()

    alone = len(a.code)  # r8 is the image; the stack is that of the loop above, and the address to return to
    a.push(R15)
    a.load(R15, Memory(RSP, 16 + _CALL.displacement))
    a.load(RAX, Memory(RSP, 16 + _SLOT.displacement))
    a.add(R15, RBP)
    a.load(RCX, Memory(RSI, 16))
    a.add(RCX, R15)
    a.push(RCX)  # the end of the phases, at 24 from now on
    a.push(RAX)
    a.push(R8)
    a.push(R8)
    phase = len(a.code)
    a.mov_immediate(RAX, 0)
    a.store(_COUNTER, RAX)
    item = len(a.code)
    a.load(RAX, _COUNTER)
    a.compare(RAX, field("items"))
    none_left = a.jump_forward("ae")
    _run_item(a, vector_bytes)
    a.increment_memory(_COUNTER)
    a.jump_back(item)
    a.land(none_left)
    a.add_immediate(R15, _PHASE_BYTES)
    a.compare(R15, Memory(RSP, 24))
    a.jump_back(phase, "ne")
    a.add_immediate(RSP, 32)
    a.pop(R15)
    a.ret()
    return Executable(np.frombuffer(bytes(a.code), np.uint8)), alone


def _worker(vector_bytes: int) -> tuple[int, int]:
    """The addresses of the worker, and of the function that runs phases alone."""
    code, alone = _code(vector_bytes)
    return code.address, code.address + alone


def _run_item(a: Assembler, vector_bytes: int) -> None:
    """Run the item whose number is in rax."""
    a.shift_left(RAX, 4)
    a.add(RAX, field("table"))
    for register, place in ((RSI, 0), (RDI, 4), (R8, 8), (R14, 12)):
        a.load_int32(register, Memory(RAX, place))
    for register in (RSI, R14):  # blocks take 24 bytes each
        a.load_address(register, Memory(register, 0, register, 2))
        a.shift_left(register, 3)
        a.add(register, field("blocks"))
    a.load(RBP, Memory(RSI, 8))
    a.load(R10, field("x_pitch"))
    a.load_address(R11, Memory(R10, 0, R10, 2))
    a.load(R12, field("out_pitch"))
    a.load(R13, field("residual_pitch"))
    a.mov(R9, RDI)
    a.multiply(R9, field("mask_bytes"))
    a.add(R9, field("masks"))
    a.shift_left(RDI, vector_bytes.bit_length() - 1)
    for pointer, pitch, name in ((RBX, None, "x"), (RDX, R12, "out"), (RCX, R13, "residual")):
        a.mov(pointer, RDI)
        a.add(pointer, field(name))
        if pitch is not None:
            a.load(RAX, Memory(RSI, 16))
            a.multiply(RAX, pitch)
            a.add(pointer, RAX)
        for number, distance in ((_IMAGE, "image"), (_SLOT, "slot")):
            a.load(RAX, number)
            a.multiply(RAX, field(f"{name}_{distance}"))
            a.add(pointer, RAX)
    a.load(RAX, Memory(R14, 0))
    a.load(R14, field("taps"))
    a.call(Memory(RSI, 0))
