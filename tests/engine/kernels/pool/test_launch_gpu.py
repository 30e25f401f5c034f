"""The pooling kernel compared with PyTorch's, on a GPU."""

import itertools

import pytest
import torch

from halve.engine.kernels.cuda import driver
from halve.engine.kernels.kernel import Layout
from halve.engine.kernels.pool import launch as pool
from halve.engine.kernels.pool.family import Pool
from halve.engine.operations import MaxPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or driver.unavailable(torch.device("cuda")) is not None,
        reason="needs a GPU from 8.0 on",
    ),
]
WINDOWS = [
    MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False),
    MaxPool((2, 2), (2, 2), (0, 0), (1, 1), True),
    MaxPool((3, 2), (1, 3), (1, 0), (2, 1), False),
    MaxPool((5, 1), (2, 1), (2, 0), (1, 1), True),
    MaxPool((5, 5), (1, 1), (2, 2), (1, 1), False),
    MaxPool((1, 1), (3, 3), (0, 0), (1, 1), False),
]


def run(x, window):
    return Pool().run([Layout.NHWC.of(x)], {}, window, "nhwc")


def images(dtype, count=2, channels=16, height=13, width=9, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, channels, height, width, generator=generator, device="cuda").to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
def test_it_matches_pytorch(dtype, window):
    for count, channels, (height, width) in itertools.product((1, 3), (8, 64, 520), ((5, 5), (13, 9), (33, 112))):
        x = images(dtype, count, channels, height, width)
        assert pool.fits(x, window.kernel)
        expected = window.reference([x], {})
        torch.full_like(expected, float("nan"))  # the next result reuses this memory
        got = run(x, window)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_propagates_and_infinities_are_compared(dtype):
    x = images(dtype)
    x[0, 3, 4, 4], x[1, :, 2, 2], x[1, 5] = float("nan"), float("inf"), -float("inf")
    got, expected = run(x, WINDOWS[0]), WINDOWS[0].reference([x], {})
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert bool(got.isnan().any())


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(lambda: images(torch.float32), id="float32"),
        pytest.param(lambda: images(torch.float16, channels=12), id="channels"),
        pytest.param(lambda: images(torch.float16).contiguous(), id="NCHW"),
        pytest.param(lambda: images(torch.float16)[:0], id="no images"),
        pytest.param(lambda: images(torch.float16)[:, :, ::2], id="every other row"),
    ],
)
def test_unsupported_inputs_fall_back_to_pytorch(x):
    x = x()
    assert not pool.fits(x, [3, 3])
    assert torch.equal(run(x, WINDOWS[0]), WINDOWS[0].reference([x], {}))


def test_a_kernel_that_does_not_compile_falls_back_to_pytorch(monkeypatch):
    pool._kernel.cache_clear()
    monkeypatch.setattr(driver, "architecture", lambda device: "sm_1")
    x = images(torch.float16)
    assert torch.equal(run(x, WINDOWS[0]), WINDOWS[0].reference([x], {}))
    pool._kernel.cache_clear()


def test_a_window_that_does_not_fit_raises_as_in_pytorch():
    with pytest.raises(RuntimeError, match="too small"):
        run(images(torch.float16), MaxPool((20, 20), (1, 1), (0, 0), (1, 1), False))
