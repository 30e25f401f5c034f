"""Setup for tests of the engine."""

import copy

import pytest
import torch

from halve.engine.kernels.registry import FAMILIES
from tests.engine.nets import SPARSE, compiled, two_convolutions
from tests.engine.timers import use_timer


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Make kernels available on a CPU in any dtype, with fake timings; returns the names of what was timed."""
    for name in ("mma_sp", "mma"):
        monkeypatch.setattr(type(FAMILIES[name]), "unavailable", lambda self, device, dtype: None)
        monkeypatch.setattr(
            type(FAMILIES[name]), "variants", lambda self, piece, device: ["64x64"] if piece.is_2_4 else []
        )
    asked = []

    def made_up(calls, device):
        for call in calls.values():
            call()
        asked.append(list(calls))
        return {name: float(number) for number, name in enumerate(calls)}

    use_timer(monkeypatch, made_up)
    return asked


@pytest.fixture(scope="module")
def compiled_net():
    """A compiled network, all layers dense, and an input."""
    model, x = two_convolutions(), torch.randn(2, 4, 8, 8)
    return compiled(model, example=x), x


@pytest.fixture
def planned_net(compiled_net):
    """A copy with one layer on a kernel of ours, which runs its reference on a CPU; an input, and the kernels."""
    fast, x = copy.deepcopy(compiled_net[0]), compiled_net[1]
    fast.layers[1].use({1: SPARSE})
    return fast, x, {layer: layer.kernel_for(1) for layer in fast.layers}
