"""Networks for the engine's tests, and functions that compile them."""

import warnings

import torch
from torch import nn

import halve
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK
from halve.engine.layer import Layer
from halve.engine.operations import Linear
from halve.errors import EngineWarning
from tests.tiny import images

SPARSE = Kernel("mma_sp", "64x64")


def compiled(model, masks=None, example=None, **options):
    example = images(2) if example is None else example
    with warnings.catch_warnings(action="ignore", category=EngineWarning):
        return halve.compile(model, halve.prune(model) if masks is None else masks, example, **options)


def sparsely(fast):
    """Use packed weights in every layer that supports them; without a GPU, reference kernels run."""
    for layer in fast.layers:
        layer.use({1: SPARSE if layer.is_2_4 else FALLBACK})
    return fast


def sparse_layer(name="fc"):
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    weight[:, ::2] = 0
    return Layer(name, Linear(4, 8), {"weight": weight})


def two_convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Hardtanh(), nn.Conv2d(8, 8, 3), nn.Hardtanh()).eval()


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.how = how

    def forward(self, *inputs):
        return self.how(self, *inputs)


def same(model, *inputs, calls=1, **options):
    """The compiled network, after checking each call against the model."""
    fast = compiled(model.eval(), halve.MaskSet({}), inputs if len(inputs) > 1 else inputs[0], **options)
    with torch.no_grad():
        for _ in range(calls):
            got = fast(*(x.clone() for x in inputs))
            torch.testing.assert_close(got, model(*(x.clone() for x in inputs)), rtol=1e-4, atol=1e-4)
    return fast
