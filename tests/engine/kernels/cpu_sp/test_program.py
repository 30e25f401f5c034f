import ctypes
import gc
import itertools
import shutil
import subprocess
import weakref
from dataclasses import replace

import pytest
import torch

from halve.engine.kernels.cpu_sp import program
from halve.engine.kernels.cpu_sp.packing import Packed, pack
from halve.engine.kernels.cpu_sp.program import Program, program_for, row_blocks
from halve.engine.kernels.planes import to_planes
from halve.engine.operations import Convolution, Linear
from halve.errors import EngineError
from tests.engine.kernels.cpu_sp.layers import Guarded, in_child, random, relative_error, two_of_four, weights_of

pytestmark = pytest.mark.cpu_kernels
CONV = Convolution(40, 16, (3, 3), padding=(1, 1), activation="relu")


def packed_of(operation, **options):
    tensors = weights_of(operation, **options)
    return pack(tensors["weight"].reshape(operation.convolution.weight_shape)), tensors["bias"]


def test_layers_with_equal_patterns_share_code():
    weight, bias = two_of_four(*CONV.weight_shape), torch.zeros(40)
    first, second = (Program(CONV, pack(weight * factor), bias) for factor in (1, 2))
    assert first.code is second.code
    assert Program(replace(CONV, activation="none"), pack(weight), bias).code is not first.code
    assert Program(CONV, pack(two_of_four(*CONV.weight_shape, seed=5)), bias).code is not first.code
    assert Program(CONV, pack(weight.bfloat16()), bias).code is not first.code
    x = random(1, 16, 5, 5)
    doubled = second.run(x, None)
    torch.testing.assert_close(doubled, 2 * first.run(x, None))


def test_programs_go_with_their_weights():
    packed, bias = packed_of(CONV)
    found = program_for(CONV, packed, bias)
    assert program_for(CONV, packed, bias) is found
    code, found = weakref.ref(found.code), weakref.ref(found)
    del packed
    gc.collect()
    assert found() is None
    assert code() is None


def test_changed_weights_are_noticed():
    packed, bias = packed_of(CONV)
    x = random(1, 16, 5, 5)
    before = program_for(CONV, packed, bias).run(x, None)
    bias += 1
    changed = program_for(CONV, packed, bias).run(x, None)
    packed.values.mul_(2)
    assert not torch.equal(changed, before)
    assert not torch.equal(program_for(CONV, packed, bias).run(x, None), changed)


def test_blocks_of_rows_are_even():
    for rows in (1, 7, 28, 29, 64, 100, 1000):
        for products in (8, 288, 4608, 100_000):
            blocks = row_blocks(rows, products, 28)
            sizes = [end - first for first, end in blocks]
            assert sum(sizes) == rows
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= 28
            assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))


GUARDED = [
    (CONV, (1, 16, 5, 7)),
    (replace(CONV, kernel=(5, 5), padding=(4, 4), dilation=(2, 2)), (2, 16, 9, 6)),
    (Convolution(7, 8), (3, 8, 3, 3)),
    (Convolution(30, 8, (1, 1), activation="relu"), (1, 8, 4, 4)),
    (Linear(20, 12), (5, 12)),
]


@pytest.mark.parametrize("at_end", [False, True], ids=["a guard page before", "a guard page after"])
@pytest.mark.parametrize(
    ("dtype", "instructions"),
    [(torch.float32, "avx512"), (torch.bfloat16, "avx512"), (torch.float32, "avx2")],
    ids=["float32", "bfloat16", "avx2"],
)
@pytest.mark.parametrize(("operation", "shape"), GUARDED, ids=[str(case[0]) for case in GUARDED])
def test_code_touches_only_its_buffers(operation, shape, dtype, instructions, at_end):
    packed, bias = packed_of(operation, dtype=dtype)
    x, residual = random(*shape).to(dtype), random(*operation.out_shape(shape), seed=1).to(dtype)
    dim, size = operation.channel_dim, x.element_size()

    def guarded(tensor):
        pixels = tensor.numel() // tensor.shape[dim]
        strides = [s if d != dim % tensor.dim() else pixels for d, s in enumerate(to_planes(tensor, dim).stride())]
        memory = Guarded(tensor.numel() * size, at_end)
        return memory, memory.tensor(dtype, tensor.shape, strides).copy_(tensor)

    def run():
        layer = Program(operation, packed, bias, instructions=instructions)
        (x_memory, mine), (residual_memory, added) = guarded(x), guarded(residual)
        prepared = layer.prepare(mine, added)
        assert prepared.copies is None
        out_memory = Guarded(prepared.numbers * size, at_end)
        prepared.run(x_memory.address, out_memory.address, residual_memory.address)
        y = out_memory.tensor(dtype, prepared.shape, prepared.strides)
        tensors = {"weight": weights_of(operation, dtype=dtype)["weight"], "bias": bias}
        assert relative_error(y, operation, tensors, [x, residual]) <= 1e-2

    assert in_child(run) == 0


def test_a_guard_page_is_noticed():
    def touch():
        ctypes.memset(Guarded(64, at_end=True).address, 0, 65)

    assert in_child(touch) < 0


@pytest.mark.parametrize(("instructions", "most"), [("avx512", 10), ("avx2", 14)])
def test_the_size_of_the_code_is_bounded_and_known(instructions, most):
    layer = Program(replace(CONV, channels=256), *packed_of(replace(CONV, channels=256)), instructions=instructions)
    kept = 40 * 9 * 256 // 2
    assert 7 * kept < layer.code.size < most * kept


def test_a_layer_whose_code_would_be_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(program, "MAX_VALUES", 40 * 9 * 8 - 1)
    with pytest.raises(EngineError, match="at most 2,879 packed values, got 2,880"):
        Program(CONV, *packed_of(CONV))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize(("instructions", "expected"), [("avx512", "zmm"), ("avx2", "ymm")])
def test_code_keeps_to_its_instruction_set(instructions, expected, tmp_path):
    layer = Program(CONV, *packed_of(CONV), instructions=instructions)
    (tmp_path / "code").write_bytes(layer.code.memory.bytes.tobytes())
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", tmp_path / "code"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert listing.count("vfmadd231ps") == 40 * 9 * 16 // 2
    assert {word for word in ("ymm", "zmm") if word in listing} == {expected}
    assert "(bad)" not in listing


BAD = [
    (lambda p, b: (Packed(p.values[:-1], p.codes), b), "values .* must have shape"),
    (lambda p, b: (Packed(p.values, p.codes[:, :, :-1]), b), "codes .* must have shape"),
    (lambda p, b: (Packed(p.values, p.codes.int()), b), "codes .* in torch.uint8"),
    (lambda p, b: (Packed(p.values, p.codes + 6), b), "below 6"),
    (lambda p, b: (Packed(p.values.double(), p.codes), b), "must be torch.float32 or torch.bfloat16"),
    (lambda p, b: (p, b.double()), "bias .* in torch.float32"),
    (lambda p, b: (p, b[:-1]), "bias .* must have shape"),
]


@pytest.mark.parametrize(("damage", "message"), BAD, ids=[message for _, message in BAD])
def test_weights_that_do_not_fit_are_refused(damage, message):
    with pytest.raises(EngineError, match=message):
        Program(CONV, *damage(*packed_of(CONV)))
    with pytest.raises(EngineError, match="one group"):
        Program(replace(CONV, groups=2), *packed_of(CONV))


@pytest.mark.parametrize(
    ("x", "residual", "message"),
    [
        (torch.zeros(1, 8, 5, 5), None, r"shape \(N, 16, H, W\), got \(1, 8, 5, 5\)"),
        (torch.zeros(16, 5, 5), None, "shape"),
        (torch.zeros(1, 16, 5, 5), torch.zeros(1, 40, 5, 4), "residual must have the shape"),
        (torch.zeros(2, 16, 5, 5), None, "stored as planes"),
        (torch.zeros(1, 16, 5, 5), torch.zeros(1, 5, 5, 40).permute(0, 3, 1, 2), "residual must be stored as planes"),
        (torch.zeros(1, 16, 5, 5).double(), None, "computes in torch.float32"),
        (torch.zeros(1, 16, 5, 5, device="meta"), None, "got torch.float32 on meta"),
        (torch.zeros(1, 16, 5, 5), torch.zeros(1, 40, 5, 5, dtype=torch.bfloat16), "computes in torch.float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, residual, message):
    with pytest.raises(EngineError, match=message):
        Program(CONV, *packed_of(CONV)).run(x, residual)


@pytest.mark.parametrize("changed", [{"stride": (0, 1)}, {"dilation": (-1, 1)}, {"kernel": (9, 1), "padding": (-9, 0)}])
def test_hostile_geometry_is_refused(changed):
    operation = replace(CONV, **changed)
    with pytest.raises(EngineError, match=r"must be positive|no output"):
        Program(operation, *packed_of(operation)).run(torch.zeros(1, 16, 5, 5), None)


def test_a_program_forgets_old_shapes(monkeypatch):
    monkeypatch.setattr(program, "_MAX_SHAPES", 3)
    layer = Program(CONV, *packed_of(CONV))
    for width in range(1, 9):
        assert layer.run(torch.zeros(1, 16, 3, width), None).shape == (1, 40, 3, width)
    assert len(layer._prepared) <= 3
