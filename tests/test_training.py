"""Training the dense networks of the experiments."""

import importlib

import pytest
import torch
from torch import nn

from halve.learn.distributed import Processes
from tests.processes import ROOT


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("training")


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def batches():
    """Dark and bright images, which are easy to tell apart."""
    labels = torch.arange(64) % 2
    noise = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = noise + 2 * labels[:, None, None, None]
    return list(zip(images.split(16), labels.split(16), strict=True))


def accuracy(model):
    return float(torch.cat([model(images).argmax(1) == labels for images, labels in batches()]).float().mean())


def test_a_network_learns(training, tmp_path):
    model, said = network(), []
    recipe = training.Recipe.of(model, 12)
    assert not recipe.adam
    assert training.train_(
        *(model, batches(), recipe, Processes(torch.device("cpu")), tmp_path / "state"), batch=16, report=said.append
    )
    assert not model.training
    assert accuracy(model) > 0.9
    assert len(said) == 12
    assert said[-1].startswith("epoch 12 of 12, loss ")
    assert not (tmp_path / "state").exists()


def test_a_run_that_was_stopped_goes_on(training, tmp_path):
    said, state = [], tmp_path / "state"
    run = (batches(), training.Recipe.of(network(), 3), Processes(torch.device("cpu")), state)
    assert not training.train_(
        network(), *run, batch=16, report=said.append, stop=lambda: len(said) == 1
    )  # asked before it is said
    weights = torch.load(state, weights_only=True)["model"]["0.weight"]
    model = network()
    assert training.train_(model, *run, batch=16, report=said.append)
    assert [line[:12] for line in said] == ["epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3"]
    assert not torch.equal(model[0].weight, network()[0].weight)
    assert (model[0].weight - weights).norm() < (network()[0].weight - weights).norm()  # the last epoch is a small step
    assert not state.exists()
