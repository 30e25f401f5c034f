"""Proofs in parts: both signs of a ReLU's input are proven, and nothing is left out."""

import math

import pytest
import torch
from torch import nn

import halve
from benchmarks.soundness import image, network
from halve.certify import branch
from halve.certify.attack import attack_input, attack_weights, margin_of
from halve.certify.branch import Branching
from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds, Choices
from halve.certify.margins import proven_margins
from halve.certify.network import network_of
from halve.certify.rounding import Interval, around
from halve.errors import OptionError
from tests.tiny import convnet

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def perceptron(seed, inner=nn.ReLU):
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), inner(), nn.Linear(8, 8), inner(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double().requires_grad_(False)


def branching(model, x, radius, changes=None):
    """For the margin of the class over the next one, with what a backward pass knows."""
    label = int(model(x).argmax())
    row = torch.zeros(1, 3, dtype=torch.float64)
    row[0, label], row[0, (label + 1) % 3] = 1.0, -1.0
    captured, box = network_of(model, x), around(x, torch.full_like(x, radius))
    bounds = Bounds(captured, box, changes or {})
    return Branching(captured, box, changes or {}, bounds.values, row), bounds


def test_parts_prove_what_no_slopes_prove():
    """relu(x) is 0.1 above relu(2 x) / 2 - 0.1 everywhere; parts without any input need multipliers."""
    first, last = nn.Linear(1, 2).double(), nn.Linear(2, 2).double()
    first.weight.data, first.bias.data = float64([[1.0], [2.0]]), float64([0.0, 0.0])
    last.weight.data, last.bias.data = float64([[1.0, 0.0], [0.0, 0.5]]), float64([0.0, -0.1])
    model, x = nn.Sequential(first, nn.ReLU(), last).requires_grad_(False), float64([[0.0]])
    captured, box, row = network_of(model, x), Interval(x - 1, x + 1), float64([[1.0, -1.0]])
    bounds = Bounds(captured, box)
    assert float(bounds.optimised(row, -1, None, 50, 0.1)) == pytest.approx(-0.4, abs=0.01)
    parts = Branching(captured, box, {}, bounds.values, row)
    assert parts.lower(1) < 0
    assert 0 < parts.lower(20) <= 0.1
    [found] = proven_margins(captured, box, {}, [0], True, branches=20)
    assert 0 < found.bound <= 0.1


@pytest.mark.parametrize("seed", range(6))
def test_no_input_lies_below_the_bound_of_parts_and_slopes_are_no_better(seed):
    model, x = perceptron(seed), image(seed)[:1, 0, :4].double()
    for radius in (0.2, 0.5, 1.0):
        parts, bounds = branching(model, x, radius)
        points = torch.rand(4000, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        points[:2000] = points[:2000].round()
        least = (model(x + radius * (2 * points - 1)) @ parts.row[0]).min()
        slopes = float(bounds.optimised(parts.row, -1, None, 12, 0.1))
        assert slopes - 1e-9 <= parts.lower(60) <= float(least)


@pytest.mark.parametrize("seed", range(3))
def test_no_update_lies_below_the_bound_of_parts(seed):
    model, x = perceptron(seed), image(seed)[:1, 0, :4].double()
    label, captured = int(model(x).argmax()), network_of(model, x)
    radii = {name: 0.2 * layers[0].weight.abs() for name, layers in captured.layers.items()}
    changes = {name: WeightBox(radius) for name, radius in radii.items()}
    [found] = proven_margins(captured, Interval(x, x), changes, [label], True, branches=40)
    assert found.bound <= attack_weights(model, x[0], label, radii)


def test_a_part_that_is_left_out_would_be_noticed(monkeypatch):
    half = branch._half
    monkeypatch.setattr(branch, "_half", lambda part, where, sign: half(part, where, 1.0))
    wrong = 0
    for seed in range(6):
        model, x = perceptron(seed), image(seed)[:1, 0, :4].double()
        parts, _ = branching(model, x, 1.0)
        points = torch.rand(4000, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).round()
        wrong += parts.lower(60) > float((model(x + 2 * points - 1) @ parts.row[0]).min())
    assert wrong


def test_any_multipliers_are_sound():
    model, x = perceptron(0), image(0)[:1, 0, :4].double()
    parts, whole = branching(model, x, 1.0)
    generator = torch.Generator().manual_seed(0)
    points = x + 2 * torch.rand(20_000, 4, generator=generator, dtype=torch.float64) - 1
    inside = model[0](points)
    for at in range(8):
        for sign in (1.0, -1.0):
            splits = {1: torch.zeros(1, 8, dtype=torch.float64)}
            splits[1][0, at] = sign
            bounds = Bounds(parts.network, parts.box, known=whole.values, splits=splits)
            there = points[inside[:, at] * sign >= 0]
            if not len(there):
                continue
            least = float((model(there) @ parts.row[0]).min())
            for _ in range(20):
                wild = {1: 4 * torch.randn(1, 8, generator=generator, dtype=torch.float64)}
                assert float(bounds.lower(parts.row, choices=Choices({}, wild))) <= least


class Twice(nn.Module):
    """Two ReLUs that read the same value."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x)
        return self.one(y.relu()) - self.other(y.relu())


def test_two_relus_may_read_the_same_value():
    torch.manual_seed(0)
    model, x = Twice().double().requires_grad_(False), image(0)[:1, 0, :4].double()
    parts, bounds = branching(model, x, 3.0)
    points = torch.rand(4000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    least = float((model(x + 3 * (2 * points - 1)) @ parts.row[0]).min())
    slopes = float(bounds.optimised(parts.row, -1, None, 12, 0.1))
    assert slopes + 0.05 < parts.lower(60) <= least


def test_networks_without_relu_have_no_parts():
    model, x = perceptron(0, nn.GELU), image(0)[:1, 0, :4].double()
    parts, bounds = branching(model, x, 3.0)
    plain = float(bounds.lower(parts.row))
    assert plain < 0
    assert parts.lower(60) == pytest.approx(plain)


def test_a_bound_that_rises_too_slowly_is_given_up(monkeypatch):
    assert branch._hopeless(-10.0, -9.0, 64, 1000)
    assert not branch._hopeless(-1.0, -0.5, 64, 1000)
    parts, _ = branching(perceptron(2), 5 * image(2)[:1, 0, :4].double(), 50.0)
    asked = []
    divided = Branching._divided
    monkeypatch.setattr(branch, "_PROBE", 4)
    monkeypatch.setattr(Branching, "_divided", lambda self, some: asked.append(len(some)) or divided(self, some))
    monkeypatch.setattr(branch, "_hopeless", lambda *args: True)
    assert parts.lower(1000) < 0
    assert len(asked) == 2  # 1 part, 2 more, and 2 or 4 more
    assert parts.lower(1000, deadline=-math.inf) < 0
    assert len(asked) == 2


def test_overflowing_parts_prove_nothing():
    model = perceptron(0)
    parts, _ = branching(model, image(0)[:1, 0, :4].double(), 1.0)
    model[2].weight.mul_(1e60)
    wide = Branching(network_of(model, torch.zeros(1, 4)), parts.box, {}, parts.known, parts.row)
    known = [Interval(torch.full_like(x.low, -1e300), torch.full_like(x.high, 1e300)) for x in parts.known]
    assert Branching(wide.network, parts.box, {}, known, parts.row).lower(20) == -math.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 3, 9])
def test_convolutions_and_residual_sums_are_divided_soundly(seed, device):
    model, x = network(seed).to(device), image(seed)[None].to(device)
    label, box = int(model(x).argmax()), around(x, torch.full_like(x, 0.1))
    [found] = proven_margins(network_of(model, x), box, {}, [label], True, branches=24)
    assert found.bound <= attack_input(model, box, label)
    assert found.bound <= float(margin_of(model(x)[0], label))


def test_certificates_say_into_how_many_parts_proofs_were_divided():
    model = convnet()
    masks = halve.prune(model)
    x = torch.rand(6, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = halve.certify(model, masks, x, region=0.03)
    found = halve.certify(model, masks, x, region=0.03, branches=30)
    assert found.settings["branches"] == 30
    assert found.result["certified"] >= plain.result["certified"]
    assert halve.certify(model, masks, x, check=found).sentence == found.sentence
    for wrong in (-1, 1.5, True):
        with pytest.raises(OptionError, match="branches must be 0 or a positive integer"):
            halve.certify(model, masks, x, region=0.03, branches=wrong)
    with pytest.raises(OptionError, match=r"branches= is for region="):
        halve.certify(model, masks, x, branches=10)
