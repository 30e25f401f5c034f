"""benchmarks/check_layers.py compares every layer of a network with float64."""

import importlib
from pathlib import Path

import pytest
import torch

import halve
from halve.engine.kernels.dense.family import Dense
from halve.engine.layer import Layer
from halve.engine.operations import ChainedConvolution, Convolution, Linear
from tests.tiny import convnet, images

LIMIT = 32.0  # in float32


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module("check_layers")


def linear():
    torch.manual_seed(0)
    return Layer("fc", Linear(8, 32, activation="gelu"), {"weight": torch.randn(8, 32), "bias": torch.randn(8)})


def test_a_right_kernel_is_off_by_rounding_alone(script):
    [(kernel, error)] = script.errors(linear(), [torch.randn(16, 32)], sparse=False).items()
    assert kernel.startswith("dense")
    assert 0 < error < LIMIT


@pytest.mark.parametrize("wrong", [lambda y: y * 1.001, lambda y: y.masked_fill(y == y.max(), float("nan"))])
def test_a_wrong_kernel_is_found(script, monkeypatch, wrong):
    run = Dense.run
    monkeypatch.setattr(Dense, "run", lambda *given: wrong(run(*given)))
    assert max(script.errors(linear(), [torch.randn(16, 32)], sparse=False).values()) > LIMIT


@pytest.mark.parametrize("value", [0.0, 1e-30, float("nan")])
def test_a_wrong_value_is_found_where_the_exact_one_is_zero(script, monkeypatch, value):
    layer = Layer("fc", Linear(8, 32), {"weight": torch.cat([torch.zeros(1, 32), torch.randn(7, 32)])})
    run = Dense.run

    def wrong(*given):
        result = run(*given)
        result[:, 0] = value
        return result

    monkeypatch.setattr(Dense, "run", wrong)
    [error] = script.errors(layer, [torch.randn(16, 32)], sparse=False).values()
    assert (error < LIMIT) == (value == 0.0)


@pytest.mark.filterwarnings("ignore:running dense:halve.errors.EngineWarning")
def test_every_layer_of_a_network_is_checked(script):
    model = convnet()
    fast = halve.compile(model, halve.prune(model), images(2), progress=False)
    found = script.checked(fast, images(2))
    assert {layer for layer, _, _ in found} == {layer.name for layer in fast.layers}
    assert all(error < LIMIT for _, _, error in found)


def test_sizes_are_those_without_activations(script):
    assert script.plain(Convolution(8, 4, activation="relu")).activation == "none"
    chain = script.plain(ChainedConvolution(8, 4, "relu", next_rows=2, next_activation="relu"))
    assert (chain.activation, chain.next_activation) == ("none", "none")
