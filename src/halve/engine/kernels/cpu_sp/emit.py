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

from halve.engine.kernels.cpu_sp.arithmetic import FAR, LINE, Arithmetic
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
    Assembler,
    Bytes,
    Memory,
)
from halve.engine.kernels.cpu_sp.worker import field

_WEIGHT = 4  # bytes that an instruction reads: a weight, or two in bfloat16
_ALIGNMENT = 64  # of functions
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
    """Code with zmm0 for every vector, and where its multiply-adds are: the first, and the distances between them."""

    code: Bytes
    first: int
    tap_bytes: int
    group_bytes: int


def emit_block(arithmetic: Arithmetic, shape: Shape, vectors: npt.NDArray[np.uint8]) -> Bytes:
    """The function for a block of rows.

    Args:
        arithmetic: of the dtype.
        shape: of the block.
        vectors: which vector each multiply-add reads: (taps, groups, products, rows).
    """
    template = _template(arithmetic, shape)
    code = template.code.copy()
    named = np.lib.stride_tricks.as_strided(
        code[template.first + arithmetic.multiply_add.multiplicand_byte :],
        (shape.taps, shape.groups, shape.products * shape.rows),
        (template.tap_bytes, template.group_bytes, arithmetic.multiply_add.size),
    )
    named[:] = arithmetic.multiply_add.multiplicands(range(16))[vectors.reshape(named.shape)]
    return code


@functools.lru_cache(16)
def _template(arithmetic: Arithmetic, shape: Shape) -> _Template:
    accumulators = range(arithmetic.first_accumulator, arithmetic.first_accumulator + shape.rows)
    header = _group_header(arithmetic, shape)
    multiply_adds = arithmetic.multiply_add.encode(list(accumulators) * shape.products, RSI)
    group = header + multiply_adds.tobytes()
    one_tap = group * shape.groups

    a = Assembler()
    arithmetic.begin(a)
    top = len(a.code)
    arithmetic.begin_vector(a)
    for row, accumulator in enumerate(accumulators):  # the biases are the first weights
        arithmetic.broadcast(a, accumulator, Memory(RBP, _WEIGHT * row))
    start = len(a.code)
    for tap in range(shape.taps):
        tap_header = _tap_header(arithmetic, shape, tap, len(one_tap))
        a.code += tap_header + one_tap
    arithmetic.finish(a, accumulators, shape.relu)
    for pointer in (RBX, RDX, RCX):
        a.add_immediate(pointer, arithmetic.vector_bytes)
    a.add_immediate(R9, 2 * (shape.taps + 1))
    a.decrement(R8)
    a.jump_back(top, "ne")
    a.ret()
    a.code += b"\x90" * (-len(a.code) % _ALIGNMENT)
    first = start + len(tap_header) + len(header)
    return _Template(np.frombuffer(bytes(a.code), np.uint8), first, len(tap_header) + len(one_tap), len(group))


def _group_header(arithmetic: Arithmetic, shape: Shape) -> bytes:
    """Point to the weights of a group and load its vectors."""
    weights = shape.products * shape.rows
    a = Assembler()
    a.add_immediate(RSI, _WEIGHT * weights)
    arithmetic.load_group(a, shape.width, shape.kept)
    for scale in (4, 2, 1):
        if shape.width & scale:
            a.load_address(RDI, Memory(RDI, 0, R10, scale))
    for line in range(LINES_AHEAD):
        a.prefetch_far(Memory(RAX, LINE * line))
    a.add(RAX, field("code_step"))
    return bytes(a.code)


def _tap_header(arithmetic: Arithmetic, shape: Shape, tap: int, length: int) -> bytes:
    """Load the mask of a tap, skip it if no pixel needs it, and set the pointers. Equally long for all taps."""
    weights = shape.products * shape.rows
    middle = _WEIGHT * arithmetic.multiply_add.most // 2
    start = _WEIGHT * (shape.rows + (tap * shape.groups - 1) * weights) + middle
    a = Assembler()
    arithmetic.test_tap(a, 2 * (tap + 1))
    skip = a.jump_forward("e")
    arithmetic.begin_tap(a)
    a.load(RDI, Memory(R14, FAR))
    a.patch(8 * tap)
    a.add(RDI, RBX)
    a.load_address(RSI, Memory(RBP, FAR))
    a.patch(start)
    a.land(skip, length)
    return bytes(a.code)
