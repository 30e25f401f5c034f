"""Neighbouring layers form chains, and networks compute the same with them."""

import pytest
import torch
from torch import nn

import halve
from halve.engine import inductor
from halve.engine.chains import Chained, with_chains
from halve.engine.fuse import fuse
from halve.engine.layer import Layer
from halve.engine.visit import visit
from halve.graph import capture

pytestmark = pytest.mark.cpu_kernels


class Block(nn.Module):
    def __init__(self, channels, between=None):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.between = between

    def forward(self, x):
        y = self.first(x).relu()
        if self.between is not None:
            y = self.between(y)
        return (x + self.second(y)).relu()


def chained(net, x):
    """The network and its chained form, all layers on our dense kernel."""
    body = fuse(capture(net.eval(), x).parts[0])
    layers = [layer for layer in body.modules() if isinstance(layer, Layer)]
    kernels = {layer: layer.available_kernels(x.device)[-1] for layer in layers}
    assert all(kernel.family in ("cpu", "cpu_pool") for kernel in kernels.values())
    for layer, kernel in kernels.items():
        layer.use({1: kernel})
    shapes = {}
    expected = visit(layers, lambda: body(x), lambda layer, given: shapes.setdefault(layer, tuple(given[0].shape)))
    return with_chains(body, kernels, shapes), expected


def chains_of(module):
    return [one for one in module.modules() if isinstance(one, Chained)]


@torch.no_grad()
def test_a_network_of_layers_is_one_chain():
    x = torch.randn(2, 3, 16, 16)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Block(8), Block(8), nn.AdaptiveAvgPool2d(1))
    module, expected = chained(net, x)
    assert len(chains_of(module)) == 1
    assert not any(isinstance(one, Layer) for one in module.modules())
    assert torch.equal(module(x), expected)
    torch.testing.assert_close(expected, net(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_operation_between_layers_splits_a_chain():
    x = torch.randn(2, 8, 16, 16)
    net = nn.Sequential(Block(8), Block(8, nn.Sigmoid()), Block(8))
    module, expected = chained(net, x)
    assert len(chains_of(module)) == 2  # the residual of the second block belongs to the first chain
    assert torch.equal(module(x), expected)


@torch.no_grad()
def test_values_that_others_read_are_results():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(3))

        def forward(self, x):
            found = []
            for block in self.blocks:
                x = block(x)
                found.append(x.sigmoid())
            return found, x

    x = torch.randn(2, 8, 16, 16)
    module, expected = chained(Pyramid(), x)
    assert len(chains_of(module)) == 1
    (levels, last), (expected_levels, expected_last) = module(x), expected
    assert torch.equal(last, expected_last)
    assert all(map(torch.equal, levels, expected_levels))


@torch.no_grad()
def test_a_layer_that_is_alone_stays():
    x = torch.randn(2, 8, 16, 16)
    module, expected = chained(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid()), x)
    assert not chains_of(module)
    assert torch.equal(module(x), expected)


@torch.no_grad()
def test_a_layer_that_runs_twice_on_other_sizes():
    conv = nn.Conv2d(8, 8, 3, padding=1)
    net = nn.Sequential(conv, nn.MaxPool2d(2), conv)
    x = torch.randn(2, 8, 10, 10)
    module, expected = chained(net, x)
    assert torch.equal(module(x), expected)


@torch.no_grad()
def test_compiled_networks_run_chains(monkeypatch):
    made = []
    original = inductor.with_chains
    monkeypatch.setattr(inductor, "with_chains", lambda *args: made.append(original(*args)) or made[-1])
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Block(8), Block(8), nn.AdaptiveAvgPool2d(1)).eval()
    x = torch.randn(2, 3, 32, 32)
    masks = halve.prune(net)
    fast = halve.compile(net, masks, x, inductor=True, progress=False)
    assert made
    for batch in (1, 2, 5):
        images = torch.randn(batch, 3, 32, 32)
        torch.testing.assert_close(fast(images), halve.apply(net, masks)(images), rtol=1e-4, atol=1e-5)
