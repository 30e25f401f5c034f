"""The dense ways of the operations, and what torch.library says of all of them, on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from halve.engine import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
ONE = [1, 1]


def random(*shape, dtype=torch.float16, seed=0):
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ops.DENSE_WAYS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_dense_ways_of_a_convolution_agree_with_float64(activation, bias, residual, way, dtype):
    size = 1 if way == "gemm" else 3
    x, w = random(2, 24, 7, 5, dtype=dtype), random(40, 24, size, size, dtype=dtype, seed=1)
    b = random(40, dtype=dtype, seed=2) * bias
    r = random(2, 40, 7, 5, dtype=dtype, seed=3) * residual
    padding = [size // 2, size // 2]
    got = ops.conv2d(x, w, b if bias else None, r if residual else None, ONE, padding, ONE, 1, activation, way)
    x, w, b, r = (t.double() for t in (x, w, b, r))
    expected = ops.ACTIVATIONS[activation](F.conv2d(x, w, b, padding=padding) + r)
    scale = F.conv2d(x.abs(), w.abs(), b.abs(), padding=padding) + r.abs()
    assert bool(((got.double() - expected).abs() <= TOLERANCE[dtype] * scale).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_dense_ways_of_a_linear_layer_agree_with_float64(activation, dtype):
    x, w, b = random(3, 7, 24, dtype=dtype), random(40, 24, dtype=dtype, seed=1), random(40, dtype=dtype, seed=2)
    expected = ops.ACTIVATIONS[activation](F.linear(x.double(), w.double(), b.double()))
    scale = F.linear(x.double().abs(), w.double().abs(), b.double().abs())
    for way in ("torch", "gemm"):
        got = ops.linear(x, w, b, None, activation, way)
        assert bool(((got.double() - expected).abs() <= TOLERANCE[dtype] * scale).all())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ops.DENSE_WAYS)
def test_torch_finds_nothing_wrong_with_the_dense_ways(way):
    x, w, b, r = random(2, 24, 7, 5), random(40, 24, 1, 1, seed=1), random(40, seed=2), random(2, 40, 7, 5, seed=3)
    for bias, residual in ((b, None), (b, r)):
        arguments = (x, w, bias, residual, ONE, [0, 0], ONE, 1, "relu", way)
        torch.library.opcheck(torch.ops.halve.conv2d.default, arguments)
    rows, matrix = random(3, 7, 24), random(40, 24, seed=1)
    torch.library.opcheck(torch.ops.halve.linear.default, (rows, matrix, b, None, "relu", way))


@pytest.mark.filterwarnings("ignore")
def test_torch_finds_nothing_wrong_with_pooling():
    x = random(2, 16, 13, 9)
    torch.library.opcheck(torch.ops.halve.max_pool2d.default, (x, [3, 3], [2, 2], ONE, ONE, False))
