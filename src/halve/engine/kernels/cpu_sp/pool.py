"""Max pooling of planes, between layers that keep this layout.

For each channel and vector of 16 pixels, the code takes the maximum over the taps, within their masks. NaN wins, as in
PyTorch.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halve.engine.kernels.cpu_sp import features, memory
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
from halve.engine.kernels.cpu_sp.geometry import copied_planes, geometry
from halve.engine.kernels.cpu_sp.memory import Executable
from halve.engine.kernels.cpu_sp.program import ARITHMETIC
from halve.engine.kernels.cpu_sp.version import version
from halve.engine.kernels.cpu_sp.worker import LANES, launch
from halve.engine.kernels.kernel import KernelFamily, Layout, Piece
from halve.engine.kernels.planes import empty_planes
from halve.engine.operations import MaxPool, Operation, Tensors

_MAX_TAPS = 64
_SMALL = 20_000  # vectors and taps that are not worth a second thread
_NAN_MASK = 2
_X, _MAXIMUM, _LEAST = 0, 1, 2  # vectors


class CpuPool(KernelFamily):
    name = "cpu_pool"
    reads = writes = Layout.PLANES

    @property
    def version(self) -> str:
        return version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return features.unavailable(device, dtype, ARITHMETIC) or memory.unavailable()

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, MaxPool) or piece.dtype not in ARITHMETIC:
            return ()
        return ("avx512",) if operation.kernel[0] * operation.kernel[1] <= _MAX_TAPS else ()

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        [x] = inputs
        assert isinstance(operation, MaxPool)
        if x.device.type != "cpu" or x.dtype not in ARITHMETIC or not x.numel():
            return operation.reference(inputs, packed)
        images, channels, height, width = x.shape
        shape = geometry(operation, images, height, width)
        source = x if shape.direct else copied_planes(x, shape)
        out = empty_planes((images, channels, *shape.out), 1, x.dtype, x.device)
        function = _function(x.element_size(), len(shape.shifts)).address
        distances = np.array(shape.plane_of) * channels * source.stride(1) + np.array(shape.shifts)
        taps = (x.element_size() * distances).astype(np.int64)
        blocks, items = _work(function, channels, shape.vectors)
        workers = torch.get_num_threads() if shape.vectors * channels * len(taps) > _SMALL else 1
        launch(blocks, items, shape.masks, taps, source, out, None, workers=workers, code_step=0)
        return out


@functools.lru_cache(64)
def _work(function: int, channels: int, vectors: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """A block for each channel, whose "weights" are its number, and one item for each block."""
    channel = np.arange(channels)
    blocks = np.column_stack([np.full(channels, function), channel, channel]).astype(np.int64)
    items = np.column_stack([channel, np.zeros_like(channel), np.full(channels, vectors), channel]).astype(np.int32)
    return blocks, items


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
