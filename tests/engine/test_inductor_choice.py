"""Whether Inductor compiles a network, with made-up times."""

import pytest
import torch
from torch import nn

import halve
from halve.engine import inductor_choice
from halve.engine.inductor_choice import LayerTime, choose
from halve.engine.plan import Entry
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_fastest_form_is_chosen_and_remembered(planned_net, monkeypatch):
    fast, x, kernels = planned_net
    compiled = []

    def compile_body(body, chosen, inputs):
        compiled.append(set(chosen.values()))
        return (lambda *inputs: body(*inputs)), 1.0

    monkeypatch.setattr(inductor_choice, "compile_body", compile_body)
    monkeypatch.setattr(inductor_choice, "measure", lambda calls, device: dict(zip(calls, (3, 1, 2), strict=True)))
    cache = TimingCache(None)
    first = choose(fast.body, (x,), kernels, cache, "key")
    assert first.run is not None
    assert first.kernels == kernels
    assert first.seconds == 2.0
    assert len(compiled) == 2  # as planned, and all dense
    again = choose(fast.body, (x,), kernels, cache, "key")
    assert again.kernels == kernels
    assert len(compiled) == 3  # only the fastest


def test_dense_layers_win_where_they_are_faster(planned_net, monkeypatch):
    fast, x, kernels = planned_net
    monkeypatch.setattr(inductor_choice, "compile_body", lambda body, chosen, inputs: (body, 1.0))
    monkeypatch.setattr(inductor_choice, "measure", lambda calls, device: dict(zip(calls, (3, 2, 1), strict=True)))
    choice = choose(fast.body, (x,), kernels, TimingCache(None), None)
    assert {str(kernel) for kernel in choice.kernels.values()} == {"dense torch"}


@pytest.mark.parametrize(
    ("layers", "compiled"),
    [
        (LayerTime(planned_ms=0.99, dense_ms=1.5), []),
        (LayerTime(planned_ms=0.99, dense_ms=0.9), ["dense"]),
        (LayerTime(planned_ms=0.5, dense_ms=1.5), ["planned"]),
        (LayerTime(planned_ms=0.5, dense_ms=1.4), ["planned", "dense"]),  # Inductor fuses activations
        (LayerTime(planned_ms=0.5, dense_ms=0.9), ["planned", "dense"]),
        (LayerTime(planned_ms=0.0, dense_ms=0.0), ["planned", "dense"]),
    ],
)
def test_forms_that_cannot_be_faster_are_not_compiled(planned_net, monkeypatch, layers, compiled):
    fast, x, kernels = planned_net
    made = []

    def compile_body(body, chosen, inputs):
        made.append("planned" if chosen == kernels else "dense")
        return body, 1.0

    monkeypatch.setattr(inductor_choice, "compile_body", compile_body)
    monkeypatch.setattr(inductor_choice, "measure", lambda calls, device: dict.fromkeys(calls, 2.0) | {"eager": 1.0})
    cache = TimingCache(None)
    for _ in range(2):  # timed, then remembered
        choice = choose(fast.body, (x,), kernels, cache, "key", layers)
        assert (choice.run, choice.kernels) == (None, kernels)
    assert made == compiled


def test_dense_layers_are_compared_with_the_fastest_form_so_far(planned_net, monkeypatch):
    fast, x, kernels = planned_net
    made, ms = [], {"eager": 2.0, "inductor": 1.0}

    def compile_body(body, chosen, inputs):
        made.append("planned" if chosen == kernels else "dense")
        return body, 1.0

    monkeypatch.setattr(inductor_choice, "compile_body", compile_body)
    monkeypatch.setattr(inductor_choice, "measure", lambda calls, device: {name: ms[name] for name in calls})
    layers = LayerTime(planned_ms=0.5, dense_ms=1.8)  # could be faster than the eager network
    assert choose(fast.body, (x,), kernels, TimingCache(None), None, layers).kernels == kernels
    assert made == ["planned"]


def test_dense_layers_are_tried_if_the_planned_kernels_cannot_be_compiled(planned_net, monkeypatch):
    fast, x, kernels = planned_net

    def compile_body(body, chosen, inputs):
        if chosen == kernels:
            raise EngineError("outputs differ")
        return body, 1.0

    monkeypatch.setattr(inductor_choice, "compile_body", compile_body)
    ms = {"eager": 2.0, "inductor dense": 1.0}
    monkeypatch.setattr(inductor_choice, "measure", lambda calls, device: {name: ms[name] for name in calls})
    cache = TimingCache(None)
    assert choose(fast.body, (x,), kernels, cache, "key").run is not None
    assert not cache.known  # what fails now may work later
    ms["eager"] = 0.5
    assert choose(fast.body, (x,), kernels, cache, "key").failed == "outputs differ"


def test_pooling_does_not_count_as_a_dense_layer():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Hardtanh(), nn.MaxPool2d(2)).eval()
    fast = halve.compile(model, halve.prune(model), torch.randn(2, 4, 8, 8))
    entries = [
        Entry(layer.name, "", "dense torch", False, 1.0, 2.0 if layer.has_weight else 50.0, None, None, "")
        for layer in fast.layers
    ]
    assert len(entries) == 2
    fast.device = torch.device("cuda")
    assert fast._layer_time(entries, []) == LayerTime(planned_ms=2.0, dense_ms=2.0)
