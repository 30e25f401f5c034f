"""Machine code for one layer, with the positions of its weights baked in.

A function computes a few output channels ("rows") of a convolution for 16 consecutive pixels at a time, with one
accumulator per row. For each kernel position ("tap") and group of four input channels, it loads the pixels of these
channels, and then runs one instruction per kept weight, here in float32:

    vfmadd231ps accumulator, pixels of the kept channel, [weight]{1to16}  (AVX-512; see `arithmetic.py` for AVX2)

Which channel that is stands in the instruction, so that nothing is decoded at run time. Sizes and strides do not: the
same code serves all image and batch sizes.
"""

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halve.engine.kernels.cpu_sp.arithmetic import LINE, Arithmetic
from halve.engine.kernels.cpu_sp.assembler import (
    R8,
    R9,
    R10,
    R14,
    RAX,
    RBP,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    RSP,
    Assembler,
    Bytes,
    Memory,
)
from halve.engine.kernels.cpu_sp.worker import field, spans

_WEIGHT = 4  # bytes that an instruction reads: a weight, or two in bfloat16
_ALIGNMENT = 64  # of functions
_POINTERS = (RBX, RDX, RCX, R9, R8)  # what moves on from vector to vector
LINES_AHEAD = 3  # lines of code that each group fetches for the next block, see `worker.py`


class Shape(NamedTuple):
    """What the code of a block of rows depends on, besides the positions of the weights."""

    rows: int
    taps: int
    groups: int  # of input channels
    products: int  # multiply-adds of each row and group
    width: int  # input channels in a group
    kept: int  # values of each row and group
    relu: bool


class _Template(NamedTuple):
    """Code with vector 0 for every multiplicand, and where the multiply-adds of each group begin."""

    code: Bytes
    groups: npt.NDArray[np.int64]


class _Run(NamedTuple):
    """Consecutive groups of one tap."""

    tap: int
    first: int
    length: int


def emit_block(arithmetic: Arithmetic, shape: Shape, vectors: npt.NDArray[np.uint8]) -> Bytes:
    """The function for a block of rows.

    Args:
        arithmetic: of the dtype.
        shape: of the block.
        vectors: which vector each multiply-add reads: (taps, groups, products, rows).
    """
    template, multiply_add = _template(arithmetic, shape), arithmetic.multiply_add
    code = template.code.copy()
    within = multiply_add.multiplicand_byte + multiply_add.size * np.arange(shape.products * shape.rows)
    places = template.groups[:, None] + within
    code[places] = multiply_add.multiplicands(range(16))[vectors.reshape(places.shape)]
    return code


@functools.lru_cache(16)
def _template(arithmetic: Arithmetic, shape: Shape) -> _Template:
    accumulators = range(arithmetic.first_accumulator, arithmetic.first_accumulator + shape.rows)
    header = _group_header(arithmetic, shape)
    multiply_adds = arithmetic.multiply_add.encode(list(accumulators) * shape.products, RSI)
    group = header + multiply_adds.tobytes()
    parts = _parts(shape, arithmetic.part_bytes // len(group))

    a = Assembler()
    arithmetic.begin(a)
    if len(parts) > 1:
        for register in _POINTERS:
            a.push(register)
    starts = np.zeros((shape.taps, shape.groups), np.int64)
    for number, part in enumerate(parts):
        if number > 0:
            for place, register in enumerate(reversed(_POINTERS)):
                a.load(register, Memory(RSP, 8 * place))
        top = len(a.code)
        arithmetic.begin_vector(a)
        if number > 0:
            arithmetic.load_sums(a, accumulators)
        else:
            for row, accumulator in enumerate(accumulators):  # the biases are the first weights
                arithmetic.broadcast(a, accumulator, Memory(RBP, _WEIGHT * row))
        for run in part:
            a.code += _tap_header(arithmetic, shape, run, run.length * len(group))
            begins = len(a.code) + len(header)
            starts[run.tap, run.first : run.first + run.length] = begins + len(group) * np.arange(run.length)
            a.code += group * run.length
        if number < len(parts) - 1:
            arithmetic.store_sums(a, accumulators)
        else:
            arithmetic.finish(a, accumulators, shape.relu)
        for pointer in (RBX, RDX, RCX):
            a.add_immediate(pointer, arithmetic.vector_bytes)
        a.add_immediate(R9, 2 * (shape.taps + 1))
        a.decrement(R8)
        a.jump_back(top, "ne")
    if len(parts) > 1:
        a.add_immediate(RSP, 8 * len(_POINTERS))
    a.ret()
    a.code += b"\x90" * (-len(a.code) % _ALIGNMENT)
    return _Template(np.frombuffer(bytes(a.code), np.uint8), starts.reshape(-1))


def _parts(shape: Shape, most: int) -> list[list[_Run]]:
    """All groups in parts of at most this many: each part runs for all vectors, then the next.

    A part has all taps of some groups, which read the same pixels.

    >>> parts = _parts(Shape(rows=8, taps=2, groups=5, products=2, width=4, kept=2, relu=True), 6)
    >>> [[tuple(run) for run in part] for part in parts]
    [[(0, 0, 2), (1, 0, 2)], [(0, 2, 3), (1, 2, 3)]]
    """
    parts = -(-shape.groups // max(most // shape.taps, 1))
    return [[_Run(tap, first, length) for tap in range(shape.taps)] for first, length in spans(shape.groups, parts)]


def _group_header(arithmetic: Arithmetic, shape: Shape) -> bytes:
    """Point to the weights of a group and load its vectors."""
    weights = shape.products * shape.rows
    a = Assembler()
    a.add_immediate(RSI, _WEIGHT * weights)
    arithmetic.load_group(a, shape.width, shape.kept)
    for scale in (4, 2, 1):
        if shape.width & scale:
            a.load_address(RDI, Memory(RDI, 0, R10, scale))
    if arithmetic.fetches_code:
        for line in range(LINES_AHEAD):
            a.prefetch_far(Memory(RAX, LINE * line))
        a.add(RAX, field("code_step"))
    return bytes(a.code)


def _tap_header(arithmetic: Arithmetic, shape: Shape, run: _Run, length: int) -> bytes:
    """Load the mask of a tap, skip its groups if no pixel needs them, and set the pointers."""
    weights = shape.products * shape.rows
    middle = _WEIGHT * arithmetic.multiply_add.most // 2
    start = _WEIGHT * (shape.rows + (run.tap * shape.groups + run.first - 1) * weights) + middle
    a = Assembler()
    arithmetic.test_tap(a, 2 * (run.tap + 1))
    skip = a.jump_forward("e")
    arithmetic.begin_tap(a)
    a.load(RDI, Memory(R14, 8 * run.tap))
    a.add(RDI, RBX)
    if run.first:
        a.mov_immediate(RSI, run.first * shape.width)
        a.multiply(RSI, R10)
        a.add(RDI, RSI)
    a.load_address(RSI, Memory(RBP, start))
    a.land(skip, length)
    return bytes(a.code)
