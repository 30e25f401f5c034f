import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halve.engine.kernels.cpu_sp.family import CpuPool
from halve.engine.kernels.kernel import Layout, Piece
from halve.engine.operations import Linear, MaxPool
from tests.random_masks import random

FAMILY = CpuPool()
CPU = torch.device("cpu")
WINDOW = MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False)
pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@pytest.mark.cpu_kernels
@settings(max_examples=80)
@given(
    st.tuples(*(st.integers(1, n) for n in (3, 9, 40, 40))),
    pairs,
    pairs,
    st.booleans(),
    pairs,
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_pooling_is_exact(shape, kernel, stride, padded, dilation, ceil_mode, dtype, nan):
    padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
    operation = MaxPool(kernel, stride, padding, dilation, ceil_mode)
    x = random(*shape).to(dtype)
    if nan:
        x[random(*shape, seed=1) > 1.5] = torch.nan
    try:
        expected = operation.reference([x], {})
    except RuntimeError:  # the window is larger than the image
        assume(False)
    y = FAMILY.run([Layout.PLANES.of(x)], {}, operation, "avx512")
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(0), expected.nan_to_num(0))
    assert FAMILY.fake([x], {}, operation).stride() == y.stride()


@pytest.mark.cpu_kernels
def test_variants():
    assert FAMILY.variants(Piece(WINDOW, torch.float32), CPU) == ("avx512",)
    assert FAMILY.variants(Piece(WINDOW, torch.float64), CPU) == ()
    assert FAMILY.variants(Piece(MaxPool((9, 9), (1, 1), (4, 4), (1, 1), False), torch.float32), CPU) == ()
    assert FAMILY.variants(Piece(Linear(4, 4), torch.float32), CPU) == ()


def test_without_avx512_a_reference_runs():
    assert FAMILY.variants(Piece(WINDOW, torch.float32), CPU) == ()
    assert "AVX-512" in FAMILY.unavailable(CPU, torch.float32)
    assert FAMILY.run([random(2, 3, 8, 8)], {}, WINDOW, "avx512").shape == (2, 3, 4, 4)
