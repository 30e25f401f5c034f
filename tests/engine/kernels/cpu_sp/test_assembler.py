import shutil
import subprocess

import pytest

from halve.engine.kernels.cpu_sp.assembler import (
    AVX2_MULTIPLY_ADD,
    BFLOAT16_MULTIPLY_ADD,
    FLOAT32_MULTIPLY_ADD,
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
from halve.errors import EngineError

# Each instruction, its bytes, and how GNU objdump reads them.
INSTRUCTIONS = [
    (lambda a: a.mov(R15, RDI), "49 89 ff", "mov r15,rdi"),
    (lambda a: a.load(RAX, Memory(RSI, 8)), "48 8b 46 08", "mov rax,QWORD PTR [rsi+0x8]"),
    (lambda a: a.load(RAX, Memory(R13)), "49 8b 45 00", "mov rax,QWORD PTR [r13+0x0]"),
    (lambda a: a.load(RAX, Memory(RSP, 8)), "48 8b 44 24 08", "mov rax,QWORD PTR [rsp+0x8]"),
    (lambda a: a.load(RAX, Memory(R12)), "49 8b 04 24", "mov rax,QWORD PTR [r12]"),
    (lambda a: a.store(Memory(RSP, 8), RAX), "48 89 44 24 08", "mov QWORD PTR [rsp+0x8],rax"),
    (lambda a: a.subtract(R9, RDI), "4c 2b cf", "sub r9,rdi"),
    (lambda a: a.increment_memory(Memory(RSP)), "48 ff 04 24", "inc QWORD PTR [rsp]"),
    (lambda a: a.pause(), "f3 90", "pause"),
    (lambda a: a.system_call(), "0f 05", "syscall"),
    (lambda a: a.load_int32(RSI, Memory(RAX, 4096)), "48 63 b0 00 10 00 00", "movsxd rsi,DWORD PTR [rax+0x1000]"),
    (lambda a: a.load_address(R11, Memory(R10, 0, R10, 2)), "4f 8d 1c 52", "lea r11,[r10+r10*2]"),
    (lambda a: a.mov_immediate(RAX, -2), "48 c7 c0 fe ff ff ff", "mov rax,0xfffffffffffffffe"),
    (lambda a: a.add(RDI, RBX), "48 03 fb", "add rdi,rbx"),
    (lambda a: a.add(RAX, Memory(R15, 16)), "49 03 47 10", "add rax,QWORD PTR [r15+0x10]"),
    (lambda a: a.add_immediate(R9, 20), "49 81 c1 14 00 00 00", "add r9,0x14"),
    (lambda a: a.multiply(RDX, R12), "49 0f af d4", "imul rdx,r12"),
    (lambda a: a.shift_left(RDI, 6), "48 c1 e7 06", "shl rdi,0x6"),
    (lambda a: a.compare(RAX, Memory(R15, 8)), "49 3b 47 08", "cmp rax,QWORD PTR [r15+0x8]"),
    (lambda a: a.compare_zero(Memory(R15, 64)), "49 83 7f 40 00", "cmp QWORD PTR [r15+0x40],0x0"),
    (lambda a: a.decrement(R8), "49 ff c8", "dec r8"),
    (lambda a: a.fetch_and_add(Memory(R15), RAX), "f0 49 0f c1 07", "lock xadd QWORD PTR [r15],rax"),
    (lambda a: a.push(R12), "41 54", "push r12"),
    (lambda a: a.pop(RBX), "5b", "pop rbx"),
    (lambda a: a.call(Memory(RSI)), "48 ff 16", "rex.W call QWORD PTR [rsi]"),
    (lambda a: a.ret(), "c3", "ret"),
    (lambda a: a.jump_back(0, "ne"), "0f 85 fa ff ff ff", "jne 0x0"),
    (lambda a: a.jump_back(0), "e9 fb ff ff ff", "jmp 0x0"),
    (lambda a: a.land(a.jump_forward("ae"), 16), "0f 83 10 00 00 00", "jae 0x16"),
    (lambda a: a.load_mask(1, Memory(R9, 18)), "c4 c1 78 90 49 12", "kmovw k1,WORD PTR [r9+0x12]"),
    (lambda a: a.test_mask(1), "c4 e1 78 98 c9", "kortestw k1,k1"),
    (lambda a: a.set_mask(3, RDI), "c4 e1 7b 92 df", "kmovd k3,edi"),
    (
        lambda a: a.load_vector(3, Memory(RDI, 0, R11), mask=1),
        "62 b1 7c c9 10 1c 1f",
        "vmovups zmm3{k1}{z},ZMMWORD PTR [rdi+r11*1]",
    ),
    (lambda a: a.store_vector(Memory(RDI, 64), 31), "62 61 7c 48 11 7f 01", "vmovups ZMMWORD PTR [rdi+0x40],zmm31"),
    (
        lambda a: a.store_vector(Memory(RDI, 63), 31),
        "62 61 7c 48 11 bf 3f 00 00 00",
        "vmovups ZMMWORD PTR [rdi+0x3f],zmm31",
    ),
    (lambda a: a.broadcast(28, Memory(RBP, 4)), "62 62 7d 48 18 65 01", "vbroadcastss zmm28,DWORD PTR [rbp+0x4]"),
    (lambda a: a.broadcast_register(2, RDI), "62 f2 7d 48 7c d7", "vpbroadcastd zmm2,edi"),
    (lambda a: a.add_vector(31, Memory(RDI), 2), "62 61 04 42 58 3f", "vaddps zmm31{k2},zmm31,ZMMWORD PTR [rdi]"),
    (lambda a: a.maximum(17, 0, 17), "62 a1 7c 48 5f c9", "vmaxps zmm17,zmm0,zmm17"),
    (lambda a: a.blend_maximum(1, 0, 1, 1), "62 f1 7c 49 5f c9", "vmaxps zmm1{k1},zmm0,zmm1"),
    (lambda a: a.compare_nan(2, 0, 1), "62 f1 7c 49 c2 d0 03", "vcmpunordps k2{k1},zmm0,zmm0"),
    (lambda a: a.blend(1, 0, 2), "62 f1 7c 4a 28 c8", "vmovaps zmm1{k2},zmm0"),
    (lambda a: a.clear(0), "62 f1 7d 48 ef c0", "vpxord zmm0,zmm0,zmm0"),
    (
        lambda a: a.load_numbers(4, 1, Memory(RBX, 64), 1),
        "62 f1 7e c9 6f 4b 01",
        "vmovdqu32 zmm1{k1}{z},ZMMWORD PTR [rbx+0x40]",
    ),
    (
        lambda a: a.store_numbers(2, Memory(RDX, 0, R12), 4, 4),
        "62 b1 ff 4c 7f 24 22",
        "vmovdqu16 ZMMWORD PTR [rdx+r12*1]{k4},zmm4",
    ),
    (lambda a: a.copy_vector(3, 1), "62 f1 7c 48 28 d9", "vmovaps zmm3,zmm1"),
    (lambda a: a.select_from_two(4, 3, 5, 2), "62 f2 55 48 7e da", "vpermt2d zmm3,zmm5,zmm2"),
    (lambda a: a.select_from_two(2, 3, 5, 2), "62 f2 d5 48 7d da", "vpermt2w zmm3,zmm5,zmm2"),
    (
        lambda a: a.load_half(2, Memory(RDI, 0, R10, 2), 1),
        "62 b1 ff a9 6f 14 57",
        "vmovdqu16 ymm2{k1}{z},YMMWORD PTR [rdi+r10*2]",
    ),
    (lambda a: a.store_half(Memory(RDI), 9), "62 71 ff 28 7f 0f", "vmovdqu16 YMMWORD PTR [rdi],ymm9"),
    (lambda a: a.permute_words(2, 7, 2), "62 f2 c5 48 8d d2", "vpermw zmm2,zmm7,zmm2"),
    (lambda a: a.blend_words(4, 0, 1, 3), "62 f2 fd 4b 66 e1", "vpblendmw zmm4{k3},zmm0,zmm1"),
    (lambda a: a.load_widened(6, Memory(RDI), 2), "62 f2 7d ca 33 37", "vpmovzxwd zmm6{k2}{z},YMMWORD PTR [rdi]"),
    (lambda a: a.shift_lanes_left(6, 6, 16), "62 f1 4d 48 72 f6 10", "vpslld zmm6,zmm6,0x10"),
    (lambda a: a.add_vectors(9, 9, 6), "62 71 34 48 58 ce", "vaddps zmm9,zmm9,zmm6"),
    (lambda a: a.round_to_bfloat16(9, 9), "62 52 7e 48 72 c9", "vcvtneps2bf16 ymm9,zmm9"),
    (
        lambda a: a.prefetch(Memory(RDI, 64, R10, 2)),
        "42 0f 18 4c 57 40",
        "prefetcht0 BYTE PTR [rdi+r10*2+0x40]",
    ),
    (lambda a: a.prefetch_far(Memory(RAX, 64)), "40 0f 18 50 40", "rex prefetcht1 BYTE PTR [rax+0x40]"),
    (lambda a: a.load_word(RDI, Memory(R9, 18)), "49 0f b7 79 12", "movzx rdi,WORD PTR [r9+0x12]"),
    (lambda a: a.test(RDI), "48 85 ff", "test rdi,rdi"),
    (lambda a: a.load_vector_avx2(5, Memory(RDI)), "c4 e1 7c 10 2f", "vmovups ymm5,YMMWORD PTR [rdi]"),
    (
        lambda a: a.load_masked_avx2(2, 5, Memory(RDI, 0, R10, 2)),
        "c4 a2 55 2c 14 57",
        "vmaskmovps ymm2,ymm5,YMMWORD PTR [rdi+r10*2]",
    ),
    (lambda a: a.store_vector_avx2(Memory(RDI), 15), "c4 61 7c 11 3f", "vmovups YMMWORD PTR [rdi],ymm15"),
    (lambda a: a.broadcast_avx2(15, Memory(RBP, 4)), "c4 62 7d 18 7d 04", "vbroadcastss ymm15,DWORD PTR [rbp+0x4]"),
    (lambda a: a.add_vectors_avx2(9, 9, 4), "c4 61 34 58 cc", "vaddps ymm9,ymm9,ymm4"),
    (lambda a: a.maximum_avx2(9, 0, 9), "c4 41 7c 5f c9", "vmaxps ymm9,ymm0,ymm9"),
    (lambda a: a.clear_avx2(0), "c4 e1 7c 57 c0", "vxorps ymm0,ymm0,ymm0"),
    (lambda a: a.leave_vectors(), "c5 f8 77", "vzeroupper"),
]


@pytest.mark.parametrize(("write", "code", "words"), INSTRUCTIONS, ids=[words for _, _, words in INSTRUCTIONS])
def test_instructions_have_these_bytes(write, code, words):
    a = Assembler()
    write(a)
    assert a.code.hex(" ") == code


def disassembled(code, folder):
    (folder / "code").write_bytes(bytes(code))
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", "-w", folder / "code"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split("\t") for line in listing.splitlines() if line.count("\t") >= 2]
    return [" ".join(line[2].split()) for line in lines]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_a_disassembler_agrees(tmp_path):
    for write, _, words in INSTRUCTIONS:
        a = Assembler()
        write(a)
        assert disassembled(a.code, tmp_path) == [words]
    floats = FLOAT32_MULTIPLY_ADD.encode([31, 4], RSI)
    floats[:, FLOAT32_MULTIPLY_ADD.multiplicand_byte] = FLOAT32_MULTIPLY_ADD.multiplicands(range(16))[[2, 15]]
    assert disassembled(floats.tobytes(), tmp_path) == [
        "vfmadd231ps zmm31,zmm2,DWORD BCST [rsi-0x200]",
        "vfmadd231ps zmm4,zmm15,DWORD BCST [rsi-0x1fc]",
    ]
    eights = AVX2_MULTIPLY_ADD.encode([15, 6], RSI)
    eights[:, AVX2_MULTIPLY_ADD.multiplicand_byte] = AVX2_MULTIPLY_ADD.multiplicands([3, 1])
    assert disassembled(eights.tobytes(), tmp_path) == [
        "vbroadcastss ymm4,DWORD PTR [rsi-0x80]",
        "vfmadd231ps ymm15,ymm3,ymm4",
        "vbroadcastss ymm4,DWORD PTR [rsi-0x7c]",
        "vfmadd231ps ymm6,ymm1,ymm4",
    ]
    pairs = BFLOAT16_MULTIPLY_ADD.encode([20], RSI)
    pairs[:, BFLOAT16_MULTIPLY_ADD.multiplicand_byte] = BFLOAT16_MULTIPLY_ADD.multiplicands([6])
    assert disassembled(pairs.tobytes(), tmp_path) == ["vdpbf16ps zmm20,zmm6,DWORD BCST [rsi-0x200]"]


def test_what_does_not_fit_is_refused():
    a = Assembler()
    with pytest.raises(EngineError, match="does not fit into 32 bits"):
        a.add_immediate(RCX, 1 << 31)
    with pytest.raises(EngineError, match="does not fit into 32 bits"):
        a.load(R14, Memory(RAX, 1 << 40))
    with pytest.raises(EngineError, match="at most 256 weights, got 257"):
        FLOAT32_MULTIPLY_ADD.encode([4] * 257, RSI)
    with pytest.raises(EngineError, match="at most 64 weights, got 65"):
        AVX2_MULTIPLY_ADD.encode([6] * 65, RSI)
