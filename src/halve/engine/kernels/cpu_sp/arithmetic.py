"""How the code of a layer computes in float32 and in bfloat16: loads, multiply-adds, epilogues.

With AVX-512 both multiply a vector of 16 pixels by one weight, or one pair of weights, per instruction. In float32 the
vector holds one channel. In bfloat16 it holds two channels, side by side for each pixel: the two that a row keeps of
its group. With AVX2 (float32) vectors have 8 pixels, and another instruction loads the weight.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from halve.engine.kernels.cpu_sp.assembler import (
    AVX2_MULTIPLY_ADD,
    BFLOAT16_MULTIPLY_ADD,
    FLOAT32_MULTIPLY_ADD,
    R9,
    R10,
    R11,
    R12,
    R13,
    RCX,
    RDI,
    RDX,
    Assembler,
    Memory,
    MultiplyAdd,
)
from halve.engine.kernels.cpu_sp.worker import LANES, field

TAP_MASK, PIXEL_MASK = 1, 2  # mask registers
LINE = 64  # bytes of a line of the cache
_ZERO = 0  # a vector that is free in the epilogue
_CHANNEL = ((None, 1), (R10, 1), (R10, 2), (R11, 1))  # index and scale that address the channels of a group


class Arithmetic(ABC):
    """What differs between dtypes and instruction sets."""

    size: ClassVar[int]  # bytes of a number
    lanes: ClassVar[int] = LANES  # pixels in a vector
    vectors: ClassVar[int] = 32  # registers
    flags: ClassVar[tuple[str, ...]]  # instruction sets
    first_accumulator: ClassVar[int]
    multiply_add: ClassVar[MultiplyAdd]
    constants: ClassVar[npt.NDArray[np.generic]] = np.zeros(1, np.int64)  # in memory, for the code
    part_bytes: ClassVar[int] = 1 << 40  # of code that runs for all vectors before the next code does
    fetches_code: ClassVar[bool] = True  # of the next block
    least_tile: ClassVar[int] = 4  # vectors
    always_tiles: ClassVar[bool] = False  # also where the code is larger than the cache

    @property
    def max_rows(self) -> int:
        """The number of accumulators."""
        return self.vectors - self.first_accumulator

    @property
    def vector_bytes(self) -> int:
        return self.size * self.lanes

    @abstractmethod
    def begin(self, a: Assembler) -> None:
        """Set up constants, once per call of the function."""

    @abstractmethod
    def begin_vector(self, a: Assembler) -> None:
        """Begin the next vector, whose masks are at r9."""

    @abstractmethod
    def broadcast(self, a: Assembler, target: int, memory: Memory) -> None:
        """Load a number into all lanes."""

    @abstractmethod
    def test_tap(self, a: Assembler, place: int) -> None:
        """Set the condition "e" if no lane is in the mask at this place behind r9."""

    @abstractmethod
    def begin_tap(self, a: Assembler) -> None:
        """Prepare the mask that was tested."""

    @abstractmethod
    def load_group(self, a: Assembler, width: int, kept: int) -> None:
        """Load the vectors of a group of channels from rdi. Rows keep this many of them."""

    def load_sums(self, a: Assembler, accumulators: Sequence[int]) -> None:
        """Load what `store_sums` stored. Only needed if code runs in parts."""
        raise NotImplementedError

    def store_sums(self, a: Assembler, accumulators: Sequence[int]) -> None:
        """Store unfinished sums where results go. Only needed if code runs in parts."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, a: Assembler, accumulators: Sequence[int], relu: bool) -> None:
        """Add the residual, apply the activation, and store."""

    @abstractmethod
    def operands(
        self, places: npt.NDArray[np.int64], values: npt.NDArray[np.generic]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """The vector that each multiply-add reads, and its weight or pair of weights: (..., instructions).

        Args:
            places: the channel of its group that each value belongs to: (..., values of a group), ascending.
            values: the values; bfloat16 as uint16.
        """


class _Avx512(Arithmetic):
    def begin(self, a: Assembler) -> None:
        pass

    def begin_vector(self, a: Assembler) -> None:
        a.load_mask(PIXEL_MASK, Memory(R9, 0))

    def broadcast(self, a: Assembler, target: int, memory: Memory) -> None:
        a.broadcast(target, memory)

    def test_tap(self, a: Assembler, place: int) -> None:
        a.load_mask(TAP_MASK, Memory(R9, place))
        a.test_mask(TAP_MASK)

    def begin_tap(self, a: Assembler) -> None:
        pass


class Float32(_Avx512):
    size, flags = 4, ("avx512f", "avx512bw")
    first_accumulator, multiply_add = 4, FLOAT32_MULTIPLY_ADD

    def load_group(self, a: Assembler, width: int, kept: int) -> None:
        for channel in range(width):
            index, scale = _CHANNEL[channel]
            a.load_vector(channel, Memory(RDI, 0, index, scale), mask=TAP_MASK)
            a.prefetch(Memory(RDI, self.vector_bytes, index, scale))  # of the next vector

    def finish(self, a: Assembler, accumulators: Sequence[int], relu: bool) -> None:
        a.compare_zero(field("residual"))
        no_residual = a.jump_forward("e")
        a.mov(RDI, RCX)
        for accumulator in accumulators:
            a.add_vector(accumulator, Memory(RDI), PIXEL_MASK)
            a.prefetch(Memory(RDI, LINE))  # of the next vector
            a.add(RDI, R13)
        a.land(no_residual)
        a.clear(_ZERO)
        a.mov(RDI, RDX)
        for accumulator in accumulators:
            if relu:
                a.maximum(accumulator, _ZERO, accumulator)
            a.store_vector(Memory(RDI), accumulator)
            a.prefetch_to_write(Memory(RDI, LINE))
            a.add(RDI, R12)

    def operands(
        self, places: npt.NDArray[np.int64], values: npt.NDArray[np.generic]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        return places.astype(np.uint8), values.view(np.uint32)


class Float32Avx2(Arithmetic):
    """ymm0 to ymm3: the channels of a group; ymm4: a weight; ymm5: a mask, as there are no registers for masks.

    The constants are all masks of eight lanes, 32 bytes each. Two multiply-adds per cycle need 22 bytes of code, more
    than the L2 cache gives: code runs in parts that stay in the L1 cache, each for all vectors of an item.
    """

    size, lanes, vectors, flags = 4, 8, 16, ("avx2", "fma")
    first_accumulator, multiply_add = 6, AVX2_MULTIPLY_ADD
    constants = -(np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.int32)
    part_bytes, fetches_code, least_tile, always_tiles = 20 << 10, False, 32, True
    _added, _mask = 4, 5

    def begin(self, a: Assembler) -> None:
        pass

    def begin_vector(self, a: Assembler) -> None:
        pass

    def broadcast(self, a: Assembler, target: int, memory: Memory) -> None:
        a.broadcast_avx2(target, memory)

    def test_tap(self, a: Assembler, place: int) -> None:
        a.load_word(RDI, Memory(R9, place))
        a.test(RDI)

    def begin_tap(self, a: Assembler) -> None:
        self._load_mask(a, RDI)

    def _load_mask(self, a: Assembler, register: int) -> None:
        """The mask with this number."""
        a.shift_left(register, 5)
        a.add(register, field("constants"))
        a.load_vector_avx2(self._mask, Memory(register))

    def load_group(self, a: Assembler, width: int, kept: int) -> None:
        for channel in range(width):
            index, scale = _CHANNEL[channel]
            a.load_masked_avx2(channel, self._mask, Memory(RDI, 0, index, scale))

    def load_sums(self, a: Assembler, accumulators: Sequence[int]) -> None:
        a.mov(RDI, RDX)
        for accumulator in accumulators:
            a.load_vector_avx2(accumulator, Memory(RDI))
            a.add(RDI, R12)

    def store_sums(self, a: Assembler, accumulators: Sequence[int]) -> None:
        a.mov(RDI, RDX)
        for accumulator in accumulators:
            a.store_vector_avx2(Memory(RDI), accumulator)
            a.add(RDI, R12)

    def finish(self, a: Assembler, accumulators: Sequence[int], relu: bool) -> None:
        a.compare_zero(field("residual"))
        no_residual = a.jump_forward("e")
        a.load_word(RDI, Memory(R9, 0))
        self._load_mask(a, RDI)
        a.mov(RDI, RCX)
        for accumulator in accumulators:
            a.load_masked_avx2(self._added, self._mask, Memory(RDI))
            a.add_vectors_avx2(accumulator, accumulator, self._added)
            a.prefetch(Memory(RDI, LINE))
            a.add(RDI, R13)
        a.land(no_residual)
        a.clear_avx2(_ZERO)
        a.mov(RDI, RDX)
        for accumulator in accumulators:
            if relu:
                a.maximum_avx2(accumulator, _ZERO, accumulator)
            a.store_vector_avx2(Memory(RDI), accumulator)
            a.prefetch_to_write(Memory(RDI, LINE))
            a.add(RDI, R12)

    def operands(
        self, places: npt.NDArray[np.int64], values: npt.NDArray[np.generic]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        return places.astype(np.uint8), values.view(np.uint32)


class BFloat16(_Avx512):
    """zmm0 to zmm3: the channels of a group, each number twice; then pairs of channels in zmm0, 1, 2, 4, 5 and 6."""

    size, flags = 2, ("avx512f", "avx512bw", "avx512vl", "avx512_bf16")
    first_accumulator, multiply_add = 8, BFLOAT16_MULTIPLY_ADD
    constants = np.arange(32, dtype=np.uint16) // 2
    _twice, _odd_words = 7, 3  # a vector with the place of each number, twice; a mask
    _pairs: ClassVar[dict[tuple[int, int], int]] = {(0, 1): 4, (0, 2): 5, (1, 2): 6, (0, 3): 0, (1, 3): 1, (2, 3): 2}

    def begin(self, a: Assembler) -> None:
        a.mov_immediate(RDI, -0x55555556)  # 0xaaaaaaaa
        a.set_mask(self._odd_words, RDI)
        a.load(RDI, field("constants"))
        a.load_vector(self._twice, Memory(RDI))

    def load_group(self, a: Assembler, width: int, kept: int) -> None:
        for channel in range(width):
            index, scale = _CHANNEL[channel]
            a.load_half(channel, Memory(RDI, 0, index, scale), TAP_MASK)
        for channel in range(width):
            a.permute_words(channel, self._twice, channel)
        if width % 2:
            a.clear(width)  # takes the place of the channel that the last one is paired with
        for (first, second), target in self._pairs.items():
            if kept < width or (first % 2 == 0 and second == first + 1 and first < width):
                a.blend_words(target, first, second, self._odd_words)

    def finish(self, a: Assembler, accumulators: Sequence[int], relu: bool) -> None:
        a.compare_zero(field("residual"))
        no_residual = a.jump_forward("e")
        a.mov(RDI, RCX)
        for place, accumulator in enumerate(accumulators):
            added = place % self._twice
            a.load_widened(added, Memory(RDI), PIXEL_MASK)
            a.shift_lanes_left(added, added, 16)
            a.add_vectors(accumulator, accumulator, added)
            a.prefetch(Memory(RDI, LINE))
            a.add(RDI, R13)
        a.land(no_residual)
        a.clear(_ZERO)
        a.mov(RDI, RDX)
        for accumulator in accumulators:
            if relu:
                a.maximum(accumulator, _ZERO, accumulator)
            a.round_to_bfloat16(accumulator, accumulator)
            a.store_half(Memory(RDI), accumulator)
            a.prefetch_to_write(Memory(RDI, LINE))
            a.add(RDI, R12)

    def operands(
        self, places: npt.NDArray[np.int64], values: npt.NDArray[np.generic]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        bits = values.view(np.uint16).astype(np.uint32)
        if places.shape[-1] % 2:
            places = np.concatenate([places, places[..., -1:] + 1], -1)
            bits = np.concatenate([bits, np.zeros_like(bits[..., -1:])], -1)
        vectors = np.zeros((4, 4), np.uint8)
        for (first, second), vector in self._pairs.items():
            vectors[first, second] = vector
        pairs = bits[..., ::2] | bits[..., 1::2] << np.uint32(16)
        return vectors[places[..., ::2], places[..., 1::2]], pairs
