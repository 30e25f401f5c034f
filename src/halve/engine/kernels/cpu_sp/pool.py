"""Max pooling of planes, between layers that keep this layout.

For each channel and vector of 16 pixels, the code takes the maximum over the taps, within their masks. NaN wins, as in
PyTorch.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from halve.engine.kernels.cpu_sp.arithmetic import TAP_MASK
from halve.engine.kernels.cpu_sp.assembler import (
    R8,
    R9,
    R10,
    R14,
    RBP,
    RBX,
    RDI,
    RDX,
    Assembler,
    Memory,
)
from halve.engine.kernels.cpu_sp.geometry import Geometry, copied_planes, geometry
from halve.engine.kernels.cpu_sp.memory import Executable, new_planes
from halve.engine.kernels.cpu_sp.worker import LANES, Operand, Phase, Schedule
from halve.engine.operations import MaxPool

MAX_TAPS = 64
_SMALL = 20_000  # vectors and taps that are not worth a second thread
_NAN_MASK = 2
_X, _MAXIMUM, _LEAST = 0, 1, 2  # vectors


def max_pool(x: Tensor, operation: MaxPool) -> Tensor:
    """Pool images that are stored as planes, on a CPU that has the instructions."""
    images, channels, height, width = x.shape
    window = geometry(operation, images, height, width)
    source = x if window.direct else copied_planes(x, window)
    out = new_planes((images, channels, *window.out), 1, x.dtype)
    pitches = (source.stride(1), out.stride(1))
    _schedule(operation, tuple(x.shape), x.element_size(), pitches, torch.get_num_threads())(
        source.data_ptr(), out.data_ptr()
    )
    return out


@functools.lru_cache(256)
def _schedule(
    operation: MaxPool, shape: tuple[int, ...], size: int, pitches: tuple[int, int], workers: int
) -> Schedule:
    images, channels, height, width = shape
    window = geometry(operation, images, height, width)
    x, out = (Operand(place, pitch=size * pitch) for place, pitch in enumerate(pitches))
    small = window.vectors * channels * len(window.shifts) <= _SMALL
    return Schedule([pool_phase(window, channels, x, out, size)], size * LANES, 1 if small else workers)


def pool_phase(window: Geometry, channels: int, x: Operand, out: Operand, size: int) -> Phase:
    """Pooling of planes of x, of numbers of this many bytes."""
    function = _function(size, len(window.shifts)).address
    channel = np.arange(channels)
    blocks = np.column_stack([np.full(channels, function), channel, channel])  # the "weights" are the channel's number
    items = np.column_stack([channel, np.zeros_like(channel), np.full(channels, window.vectors), channel])
    distances = np.array(window.plane_of) * channels * x.pitch + size * np.array(window.shifts)
    return Phase(blocks.astype(np.int64), items.astype(np.int32), window.masks, distances.astype(np.int64), x, out)


@functools.cache
def _function(size: int, taps: int) -> Executable:
    """Pool the vectors of one channel of numbers of this many bytes."""
    a = Assembler()
    a.multiply(RBP, R10)
    a.add(RBX, RBP)
    a.mov_immediate(RDI, -0x800000)  # the bits of -infinity
    a.broadcast_register(_LEAST, RDI)
    top = len(a.code)
    a.copy_vector(_MAXIMUM, _LEAST)
    for tap in range(taps):
        a.load_mask(TAP_MASK, Memory(R9, 2 * (tap + 1)))
        a.load(RDI, Memory(R14, 8 * tap))
        if size == 2:
            a.load_widened(_X, Memory(RBX, 0, RDI, 1), TAP_MASK)
            a.shift_lanes_left(_X, _X, 16)
        else:
            a.load_vector(_X, Memory(RBX, 0, RDI, 1), mask=TAP_MASK)
        a.blend_maximum(_MAXIMUM, _X, _MAXIMUM, TAP_MASK)  # the second operand if one is NaN
        a.compare_nan(_NAN_MASK, _X, TAP_MASK)
        a.blend(_MAXIMUM, _X, _NAN_MASK)
    if size == 2:
        a.round_to_bfloat16(_MAXIMUM, _MAXIMUM)
        a.store_half(Memory(RDX), _MAXIMUM)
    else:
        a.store_vector(Memory(RDX), _MAXIMUM)
    a.add_immediate(RBX, size * LANES)
    a.add_immediate(RDX, size * LANES)
    a.add_immediate(R9, 2 * (taps + 1))
    a.decrement(R8)
    a.jump_back(top, "ne")
    a.ret()
    return Executable(np.frombuffer(bytes(a.code), np.uint8))
