"""An assembler for the few x86-64 instructions that the kernels use.

`Assembler` appends one instruction at a time: prologues, loops, epilogues. The millions of multiply-adds in between are
made by `MultiplyAdd`, all at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from halve.errors import EngineError

Bytes = npt.NDArray[np.uint8]

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15 = range(16)
_CONDITIONS = {"e": 0x84, "ne": 0x85, "ae": 0x83}  # second opcode byte of `j..` with a 32-bit distance
_MAP_0F, _MAP_0F38 = 1, 2
_NO_PREFIX, _PREFIX_66, _PREFIX_F3, _PREFIX_F2 = 0, 1, 2, 3


@dataclass(frozen=True)
class Memory:
    """The address base + index * scale + displacement."""

    base: int
    displacement: int = 0
    index: int | None = None
    scale: int = 1


class Assembler:
    """Appends instructions to `code`. Operands are in Intel order: the destination first.

    >>> a = Assembler()
    >>> a.add_immediate(RSI, 0x1234)
    >>> a.ret()
    >>> a.code.hex(" ")
    '48 81 c6 34 12 00 00 c3'
    """

    def __init__(self) -> None:
        self.code = bytearray()

    def patch(self, value: int) -> None:
        """Replace the last four bytes: a displacement."""
        del self.code[-4:]
        self._int32(value)

    # General-purpose registers, 64 bits wide.

    def mov(self, target: int, source: int) -> None:
        self._rex(0x89, source, target)

    def load(self, target: int, memory: Memory) -> None:
        self._rex(0x8B, target, memory)

    def store(self, memory: Memory, source: int) -> None:
        self._rex(0x89, source, memory)

    def load_int32(self, target: int, memory: Memory) -> None:
        """Load 32 bits, sign-extended."""
        self._rex(0x63, target, memory)

    def load_address(self, target: int, memory: Memory) -> None:
        self._rex(0x8D, target, memory)

    def mov_immediate(self, target: int, value: int) -> None:
        self._rex(0xC7, 0, target)
        self._int32(value)

    def add(self, target: int, source: int | Memory) -> None:
        self._rex(0x03, target, source)

    def add_immediate(self, target: int, value: int) -> None:
        self._rex(0x81, 0, target)
        self._int32(value)

    def subtract(self, target: int, source: int | Memory) -> None:
        self._rex(0x2B, target, source)

    def multiply(self, target: int, source: int | Memory) -> None:
        self._rex(0x0FAF, target, source)

    def shift_left(self, target: int, count: int) -> None:
        self._rex(0xC1, 4, target)
        self.code.append(count)

    def compare(self, first: int, second: Memory) -> None:
        self._rex(0x3B, first, second)

    def compare_zero(self, memory: Memory) -> None:
        self._rex(0x83, 7, memory)
        self.code.append(0)

    def decrement(self, target: int) -> None:
        self._rex(0xFF, 1, target)

    def increment_memory(self, memory: Memory) -> None:
        self._rex(0xFF, 0, memory)

    def fetch_and_add(self, memory: Memory, register: int) -> None:
        """Add the register to memory, atomically, and set it to what was there."""
        self.code.append(0xF0)
        self._rex(0x0FC1, register, memory)

    def push(self, register: int) -> None:
        self.code += bytes(([0x41] if register >= 8 else []) + [0x50 | register & 7])

    def pop(self, register: int) -> None:
        self.code += bytes(([0x41] if register >= 8 else []) + [0x58 | register & 7])

    def call(self, memory: Memory) -> None:
        self._rex(0xFF, 2, memory)

    def ret(self) -> None:
        self.code.append(0xC3)

    def pause(self) -> None:
        self.code += bytes([0xF3, 0x90])

    def system_call(self) -> None:
        """The system call whose number is in rax. Overwrites rax, rcx and r11."""
        self.code += bytes([0x0F, 0x05])

    # Jumps: forward ones are patched by `land`.

    def jump_forward(self, condition: str) -> int:
        """Jump if the condition holds. Returns the place that `land` patches."""
        self.code += bytes([0x0F, _CONDITIONS[condition], 0, 0, 0, 0])
        return len(self.code)

    def land(self, place: int, further: int = 0) -> None:
        """Let a forward jump end here, or this many bytes further on."""
        self.code[place - 4 : place] = (len(self.code) - place + further).to_bytes(4, "little", signed=True)

    def jump_back(self, target: int, condition: str | None = None) -> None:
        """Jump to an earlier position in the code, if the condition holds."""
        self.code += bytes([0xE9] if condition is None else [0x0F, _CONDITIONS[condition]])
        self._int32(target - len(self.code) - 4)

    # Masks: k0 to k7 hold one bit per lane. As a mask, k0 stands for all lanes.

    def load_mask(self, mask: int, memory: Memory) -> None:
        """kmovw mask, [memory]"""
        self._vex(_NO_PREFIX, 0x90, mask, memory)

    def test_mask(self, mask: int) -> None:
        """kortestw mask, mask: sets the condition "e" if no lane is active."""
        self._vex(_NO_PREFIX, 0x98, mask, mask)

    def set_mask(self, mask: int, register: int) -> None:
        """kmovd mask, register"""
        self._vex(_PREFIX_F2, 0x92, mask, register)

    # Vectors: zmm0 to zmm31, 16 numbers of 32 bits or 32 of 16 bits.

    def load_vector(self, target: int, memory: Memory, mask: int = 0) -> None:
        """vmovups zmm, [memory]; lanes outside of the mask are zero, and their memory is not touched."""
        self._evex(_MAP_0F, _NO_PREFIX, 0x10, target, 0, memory, unit=64, mask=mask, zero=mask != 0)

    def store_vector(self, memory: Memory, source: int) -> None:
        """vmovups [memory], zmm"""
        self._evex(_MAP_0F, _NO_PREFIX, 0x11, source, 0, memory, unit=64)

    def broadcast(self, target: int, memory: Memory) -> None:
        """vbroadcastss zmm, [memory]"""
        self._evex(_MAP_0F38, _PREFIX_66, 0x18, target, 0, memory, unit=4)

    def broadcast_register(self, target: int, register: int) -> None:
        """vpbroadcastd zmm, r32"""
        self._evex(_MAP_0F38, _PREFIX_66, 0x7C, target, 0, register)

    def add_vector(self, target: int, memory: Memory, mask: int) -> None:
        """vaddps zmm{mask}, zmm, [memory]"""
        self._evex(_MAP_0F, _NO_PREFIX, 0x58, target, target, memory, unit=64, mask=mask)

    def maximum(self, target: int, first: int, second: int) -> None:
        """vmaxps; the second operand where one is NaN."""
        self._evex(_MAP_0F, _NO_PREFIX, 0x5F, target, first, second)

    def blend_maximum(self, target: int, first: int, second: int, mask: int) -> None:
        """vmaxps target{mask}, first, second"""
        self._evex(_MAP_0F, _NO_PREFIX, 0x5F, target, first, second, mask=mask)

    def compare_nan(self, target: int, vector: int, mask: int) -> None:
        """vcmpunordps target{mask}, vector, vector: the lanes that are NaN, within the mask"""
        self._evex(_MAP_0F, _NO_PREFIX, 0xC2, target, vector, vector, mask=mask)
        self.code.append(3)

    def blend(self, target: int, source: int, mask: int) -> None:
        """vmovaps target{mask}, source"""
        self._evex(_MAP_0F, _NO_PREFIX, 0x28, target, 0, source, mask=mask)

    def clear(self, target: int) -> None:
        """vpxord zmm, zmm, zmm"""
        self._evex(_MAP_0F, _PREFIX_66, 0xEF, target, target, target)

    # Vectors of numbers of 4 or 2 bytes.

    def load_numbers(self, size: int, target: int, memory: Memory, mask: int) -> None:
        """vmovdqu32 or vmovdqu16 zmm{mask}{z}, [memory]"""
        prefix, wide = (_PREFIX_F3, False) if size == 4 else (_PREFIX_F2, True)
        self._evex(_MAP_0F, prefix, 0x6F, target, 0, memory, unit=64, mask=mask, zero=mask != 0, wide=wide)

    def store_numbers(self, size: int, memory: Memory, source: int, mask: int) -> None:
        """vmovdqu32 or vmovdqu16 [memory]{mask}, zmm"""
        prefix, wide = (_PREFIX_F3, False) if size == 4 else (_PREFIX_F2, True)
        self._evex(_MAP_0F, prefix, 0x7F, source, 0, memory, unit=64, mask=mask, wide=wide)

    def copy_vector(self, target: int, source: int) -> None:
        """vmovaps zmm, zmm"""
        self._evex(_MAP_0F, _NO_PREFIX, 0x28, target, 0, source)

    def select_from_two(self, size: int, target: int, places: int, second: int) -> None:
        """vpermt2d or vpermt2w: the numbers at these places of the target followed by the second vector"""
        opcode, wide = (0x7E, False) if size == 4 else (0x7D, True)
        self._evex(_MAP_0F38, _PREFIX_66, opcode, target, places, second, wide=wide)

    # Vectors of bfloat16.

    def load_half(self, target: int, memory: Memory, mask: int) -> None:
        """vmovdqu16 ymm{mask}{z}, [memory]: 16 numbers of 16 bits"""
        self._evex(_MAP_0F, _PREFIX_F2, 0x6F, target, 0, memory, unit=32, mask=mask, zero=True, wide=True, half=True)

    def store_half(self, memory: Memory, source: int) -> None:
        """vmovdqu16 [memory], ymm"""
        self._evex(_MAP_0F, _PREFIX_F2, 0x7F, source, 0, memory, unit=32, wide=True, half=True)

    def permute_words(self, target: int, indices: int, source: int) -> None:
        """vpermw: word i of the target is word indices[i] of the source"""
        self._evex(_MAP_0F38, _PREFIX_66, 0x8D, target, indices, source, wide=True)

    def blend_words(self, target: int, first: int, second: int, mask: int) -> None:
        """vpblendmw: words of the second inside of the mask, of the first outside"""
        self._evex(_MAP_0F38, _PREFIX_66, 0x66, target, first, second, mask=mask, wide=True)

    def load_widened(self, target: int, memory: Memory, mask: int) -> None:
        """vpmovzxwd zmm{mask}{z}, [memory]: 16 numbers of 16 bits, zero-extended"""
        self._evex(_MAP_0F38, _PREFIX_66, 0x33, target, 0, memory, unit=32, mask=mask, zero=True)

    def shift_lanes_left(self, target: int, source: int, bits: int) -> None:
        """vpslld"""
        self._evex(_MAP_0F, _PREFIX_66, 0x72, 6, target, source)
        self.code.append(bits)

    def add_vectors(self, target: int, first: int, second: int) -> None:
        """vaddps"""
        self._evex(_MAP_0F, _NO_PREFIX, 0x58, target, first, second)

    def round_to_bfloat16(self, target: int, source: int) -> None:
        """vcvtneps2bf16 ymm, zmm"""
        self._evex(_MAP_0F38, _PREFIX_F3, 0x72, target, 0, source)

    def prefetch(self, memory: Memory) -> None:
        """prefetcht0 [memory], which never faults"""
        base, index = memory.base, memory.index or 0
        self.code += bytes([0x40 | index >> 3 << 1 | base >> 3, 0x0F, 0x18])
        self._operand(1, memory, 1)

    def prefetch_to_write(self, memory: Memory) -> None:
        """prefetchw [memory], which never faults: as a line that this processor alone holds"""
        base, index = memory.base, memory.index or 0
        self.code += bytes([0x40 | index >> 3 << 1 | base >> 3, 0x0F, 0x0D])
        self._operand(1, memory, 1)

    def prefetch_far(self, memory: Memory) -> None:
        """prefetcht1 [memory], into the L2 cache"""
        base, index = memory.base, memory.index or 0
        self.code += bytes([0x40 | index >> 3 << 1 | base >> 3, 0x0F, 0x18])
        self._operand(2, memory, 1)

    def leave_vectors(self) -> None:
        """vzeroupper, before returning to code that may use SSE."""
        self.code += bytes([0xC5, 0xF8, 0x77])

    # Vectors of AVX2: ymm0 to ymm15, 8 numbers of 32 bits.

    def load_word(self, target: int, memory: Memory) -> None:
        """movzx r64, word [memory]"""
        self._rex(0x0FB7, target, memory)

    def test(self, register: int) -> None:
        """test r64, r64: sets the condition "e" if it is zero."""
        self._rex(0x85, register, register)

    def load_vector_avx2(self, target: int, memory: Memory) -> None:
        """vmovups ymm, [memory]"""
        self._vex256(_MAP_0F, _NO_PREFIX, 0x10, target, 0, memory)

    def load_masked_avx2(self, target: int, mask: int, memory: Memory) -> None:
        """vmaskmovps ymm, mask, [memory]; lanes outside of the mask are zero, and their memory is not touched."""
        self._vex256(_MAP_0F38, _PREFIX_66, 0x2C, target, mask, memory)

    def store_vector_avx2(self, memory: Memory, source: int) -> None:
        """vmovups [memory], ymm"""
        self._vex256(_MAP_0F, _NO_PREFIX, 0x11, source, 0, memory)

    def broadcast_avx2(self, target: int, memory: Memory) -> None:
        """vbroadcastss ymm, [memory]"""
        self._vex256(_MAP_0F38, _PREFIX_66, 0x18, target, 0, memory)

    def add_vectors_avx2(self, target: int, first: int, second: int) -> None:
        """vaddps ymm, ymm, ymm"""
        self._vex256(_MAP_0F, _NO_PREFIX, 0x58, target, first, second)

    def maximum_avx2(self, target: int, first: int, second: int) -> None:
        """vmaxps ymm, ymm, ymm; the second operand where one is NaN."""
        self._vex256(_MAP_0F, _NO_PREFIX, 0x5F, target, first, second)

    def clear_avx2(self, target: int) -> None:
        """vxorps ymm, ymm, ymm"""
        self._vex256(_MAP_0F, _NO_PREFIX, 0x57, target, target, target)

    # Encoding.

    def _int32(self, value: int) -> None:
        try:
            self.code += value.to_bytes(4, "little", signed=True)
        except OverflowError:
            raise EngineError(f"the layer is too large for one kernel: {value} does not fit into 32 bits") from None

    def _rex(self, opcode: int, register: int, operand: int | Memory) -> None:
        """An instruction on 64-bit registers."""
        base, index = (operand.base, operand.index or 0) if isinstance(operand, Memory) else (operand, 0)
        self.code.append(0x48 | register >> 3 << 2 | index >> 3 << 1 | base >> 3)
        self.code += bytes([opcode]) if opcode < 256 else opcode.to_bytes(2, "big")
        self._operand(register, operand, 1)

    def _vex(self, prefix: int, opcode: int, register: int, operand: int | Memory) -> None:
        """An instruction on masks."""
        base = operand.base if isinstance(operand, Memory) else operand
        self.code += bytes([0xC4, 0xC1 | (base < 8) << 5, 0x78 | prefix, opcode])
        self._operand(register, operand, 1)

    def _vex256(
        self, opcode_map: int, prefix: int, opcode: int, register: int, second: int, operand: int | Memory
    ) -> None:
        """An instruction on 256-bit vectors."""
        base, index = (operand.base, operand.index or 0) if isinstance(operand, Memory) else (operand, 0)
        self.code += _vex256_prefix(opcode_map, prefix, register, second, index >> 3 & 1, base >> 3 & 1)
        self.code.append(opcode)
        self._operand(register, operand, 1)

    def _evex(
        self,
        opcode_map: int,
        prefix: int,
        opcode: int,
        register: int,
        second: int,
        operand: int | Memory,
        *,
        unit: int = 1,  # of an 8-bit displacement, in bytes
        mask: int = 0,
        zero: bool = False,
        wide: bool = False,  # the W bit
        half: bool = False,
    ) -> None:
        """An instruction on 512-bit vectors, or on their lower halves."""
        if isinstance(operand, Memory):
            x, b = (operand.index or 0) >> 3 & 1, operand.base >> 3 & 1
        else:
            x, b = operand >> 4 & 1, operand >> 3 & 1
        self.code += _evex_prefix(
            opcode_map, prefix, register, second, x, b, mask=mask, zero=zero, wide=wide, half=half
        )
        self.code.append(opcode)
        self._operand(register, operand, unit)

    def _operand(self, register: int, operand: int | Memory, unit: int) -> None:
        """ModRM, SIB and displacement."""
        field = (register & 7) << 3
        if not isinstance(operand, Memory):
            self.code.append(0xC0 | field | operand & 7)
            return
        base, displacement, index, scale = operand.base, operand.displacement, operand.index, operand.scale
        short = displacement % unit == 0 and -128 <= displacement // unit < 128
        none = displacement == 0 and base & 7 != RBP  # that encoding means something else
        mode = 0x00 if none else 0x40 if short else 0x80
        if index is None and base & 7 != RSP:
            self.code.append(mode | field | base & 7)
        else:
            place = RSP if index is None else index & 7
            self.code += bytes([mode | field | RSP, (scale.bit_length() - 1) << 6 | place << 3 | base & 7])
        if short and not none:
            self.code.append(displacement // unit & 255)
        elif not short:
            self._int32(displacement)


def _vex256_prefix(opcode_map: int, prefix: int, register: int, second: int, x: int, b: int) -> bytes:
    """The three bytes before the opcode. High register bits are stored inverted."""
    inverted = (~register >> 3 & 1) << 7 | (x ^ 1) << 6 | (b ^ 1) << 5
    return bytes([0xC4, inverted | opcode_map, (~second & 15) << 3 | 4 | prefix])


def _evex_prefix(
    opcode_map: int,
    prefix: int,
    register: int,
    second: int,
    x: int,
    b: int,
    *,
    mask: int = 0,
    zero: bool = False,
    broadcast: bool = False,
    wide: bool = False,
    half: bool = False,
) -> bytes:
    """The four bytes before the opcode. High register bits are stored inverted."""
    r, r_high = ~register >> 3 & 1, ~register >> 4 & 1
    return bytes(
        [
            0x62,
            r << 7 | (x ^ 1) << 6 | (b ^ 1) << 5 | r_high << 4 | opcode_map,
            wide << 7 | (~second & 15) << 3 | 4 | prefix,
            zero << 7 | (1 if half else 2) << 5 | broadcast << 4 | (~second >> 4 & 1) << 3 | mask,
        ]
    )


class MultiplyAdd(ABC):
    """An instruction that multiplies a vector by one weight in memory and adds to an accumulator.

    size: bytes of the instruction, or of several.
    multiplicand_byte: the one that names the vector.
    most: weights that it can address from one pointer, which points to their middle.
    """

    size: ClassVar[int]
    multiplicand_byte: ClassVar[int]
    most: ClassVar[int]

    def encode(self, accumulators: Sequence[int], base: int) -> Bytes:
        """The instruction for each accumulator, with vector 0 and the next weight each time: uint8, (count, size).

        `base` is the register that points to the middle of the weights, so that 8-bit displacements reach all.
        """
        if len(accumulators) > self.most:
            raise EngineError(f"a group holds at most {self.most} weights, got {len(accumulators)}")
        found = [self._one(accumulator, base, place) for place, accumulator in enumerate(accumulators)]
        return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), self.size).copy()

    @abstractmethod
    def _one(self, accumulator: int, base: int, place: int) -> bytes:
        """The instruction with the weight at this place."""

    @abstractmethod
    def multiplicands(self, vectors: Sequence[int]) -> Bytes:
        """What to write at `multiplicand_byte` for these vectors, 0 to 15."""


class _Avx512(MultiplyAdd):
    size, multiplicand_byte, most = 7, 2, 256

    def __init__(self, prefix: int, opcode: int) -> None:
        self._prefix, self._opcode = prefix, opcode

    def _one(self, accumulator: int, base: int, place: int) -> bytes:
        prefix = _evex_prefix(_MAP_0F38, self._prefix, accumulator, 0, 0, base >> 3, broadcast=True)
        return prefix + bytes([self._opcode, 0x40 | (accumulator & 7) << 3 | base & 7, place - 128 & 255])

    def multiplicands(self, vectors: Sequence[int]) -> Bytes:
        return np.array([(~vector & 15) << 3 | 4 | self._prefix for vector in vectors], np.uint8)


class _Avx2(MultiplyAdd):
    """Two instructions: `vbroadcastss` loads the weight, `vfmadd231ps` multiplies."""

    size, multiplicand_byte, most = 11, 8, 64
    weight = 4  # the vector that holds it

    def _one(self, accumulator: int, base: int, place: int) -> bytes:
        a = Assembler()
        a.code += _vex256_prefix(_MAP_0F38, _PREFIX_66, self.weight, 0, 0, base >> 3)
        a.code += bytes([0x18, 0x40 | self.weight << 3 | base & 7, 4 * place - 128 & 255])
        a._vex256(_MAP_0F38, _PREFIX_66, 0xB8, accumulator, 0, self.weight)
        return bytes(a.code)

    def multiplicands(self, vectors: Sequence[int]) -> Bytes:
        return np.array([(~vector & 15) << 3 | 4 | _PREFIX_66 for vector in vectors], np.uint8)


FLOAT32_MULTIPLY_ADD = _Avx512(_PREFIX_66, 0xB8)  # vfmadd231ps: 16 products
BFLOAT16_MULTIPLY_ADD = _Avx512(_PREFIX_F3, 0x52)  # vdpbf16ps: 32 products, two neighbours into each sum
AVX2_MULTIPLY_ADD = _Avx2()  # 8 products
