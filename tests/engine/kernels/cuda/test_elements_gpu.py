"""The activations of all kernels, in single precision, against float64."""

import ctypes
from importlib import resources

import pytest
import torch

from halve.engine.kernels.cuda import driver, jit
from halve.engine.operations import ACTIVATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a GPU with compute capability 8.0",
    ),
]
_APPLY = """
extern "C" __global__ void apply(const float* x, float* y, int count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) y[at] = ACTIVATE(x[at]);
}
"""


class _Count(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int),)


def applied(name, x):
    source = resources.files("halve.engine.kernels.cuda").joinpath("elements.cu").read_text()
    code = jit.cubin(source + _APPLY, driver.architecture(0), ("-DBF16=0", f"-DACTIVATE=activate_{name}"))
    y = torch.full_like(x, float("nan"))
    driver.Kernel(code, "apply", 0, 0).launch((-(-x.numel() // 256), 1), 256, (x, y, _Count(x.numel())))
    return y


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    x = torch.cat(
        [torch.linspace(-12, 12, 1_000_001), torch.tensor([0.0, -0.0, 1e-30, 300.0, -300.0, 6e4, -6e4])]
    ).cuda()
    got, expected = applied(name, x).double(), ACTIVATIONS[name].function(x.double())
    assert float(((got - expected).abs() / expected.abs().clamp(min=1)).max()) < 2e-6


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_infinity_and_nan(name):
    x = torch.tensor([float("inf"), float("nan")], device="cuda")
    got = applied(name, x)
    assert float(got[0]) == float("inf")
    assert bool(got[1].isnan())
