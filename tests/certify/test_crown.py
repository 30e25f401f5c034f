import json
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from benchmarks.soundness import RESULT, cases, image, network, started
from halve.certify.attack import attack_input, margin_of
from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds, OutOfTime
from halve.certify.network import network_of
from halve.certify.operators import CURVES, MaxPool, Normalise, ReLU, Smooth
from halve.certify.rounding import Interval, around
from halve.errors import ModelError


@given(seed=st.integers(0, 10**6))
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_no_input_and_no_update_has_a_smaller_margin_than_the_bounds(seed):
    """A long run of the same is benchmarks/soundness.py."""
    for case in cases(seed, 8):
        assert not case.broken, case
        assert min(case.bounds.values()) < case.found + 1e-9


def test_the_long_run_found_no_bound_that_is_wrong():
    record = json.loads(RESULT.read_text())
    assert record["broken"] == []
    assert record["cases"] > 1000
    assert 0.2 < record["proven"] / record["cases"] < 1


def test_a_record_of_other_bounds_is_not_continued(tmp_path):
    path = tmp_path / "soundness.json"
    fresh = started(path)
    assert (fresh["cases"], fresh["broken"]) == (0, [])
    path.write_text(json.dumps(fresh | {"cases": 100}))
    assert started(path)["cases"] == 100
    for other in ({"cases": 100, "bounds": "0" * 64}, {"cases": 100}):
        path.write_text(json.dumps(other))
        assert started(path) == fresh


def test_a_wrong_bound_would_be_noticed(monkeypatch):
    lower = Bounds.lower
    monkeypatch.setattr(Bounds, "lower", lambda self, rows, *args, **options: lower(self, rows, *args, **options) + 0.1)
    assert any(case.broken for case in cases(3, 12))


@pytest.mark.parametrize("seed", range(3))
def test_all_intermediate_values_lie_in_their_intervals(seed):
    model, x = network(seed), image(seed)[None]
    box = around(x, torch.full_like(x, 0.05))
    bounds = Bounds(network_of(model, x), box)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10):
        inside = box.low + (box.high - box.low) * torch.rand(x.shape, generator=generator, dtype=torch.float64)
        values = []
        for node in bounds.network.nodes:
            inputs = [Interval(values[i], values[i]) for i in node.inputs]
            values.append(inside if node.operator is None else node.operator.interval(inputs).center)
        for value, (low, high) in zip(values, bounds.values, strict=True):
            assert bool((value >= low - 1e-9).all())
            assert bool((value <= high + 1e-9).all())
        assert torch.allclose(values[-1], model(inside), atol=1e-9)


def test_a_point_is_bounded_tightly_and_small_boxes_almost_exactly():
    model, x = network(3), image(3)[None]
    label, captured = int(model(x).argmax()), network_of(network(3), x)
    exact = float(margin_of(model(x)[0], label))
    assert exact - 1e-9 <= Bounds(captured, Interval(x, x)).margins([label])[0] <= exact
    near = around(x, torch.full_like(x, 1e-7))
    assert Bounds(captured, near).margins([label])[0] == pytest.approx(attack_input(model, near, label), abs=1e-6)


def test_rounding_is_part_of_the_bound():
    """In float64 the sum below comes out as 0, but it is 1: a bound of its negative must allow for that."""
    layer = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e17, 1.0, -1e17], [0.0, 0.0, 0.0]]))
    ones = torch.ones(1, 3, dtype=torch.float64)
    captured = network_of(nn.Sequential(layer), ones)
    for tighten in (False, True):
        bounds = Bounds(captured, around(ones, torch.full_like(ones, 1e-300)), tighten=tighten)
        assert bounds.values[-1].low[0, 0] <= 1 <= bounds.values[-1].high[0, 0]
        assert float(bounds.lower(torch.tensor([[1.0, 0.0]], dtype=torch.float64))) <= 1
        assert float(bounds.lower(torch.tensor([[-1.0, 0.0]], dtype=torch.float64))) <= -1


@pytest.mark.parametrize("pad", [nn.ReflectionPad1d(2), nn.ReplicationPad1d(2), nn.CircularPad1d(3)])
def test_padding_that_repeats_values_rounds_when_coefficients_add_up(pad):
    """In float64 the coefficients of the value that is repeated add up to 0, but their sum is 1."""
    ones = torch.ones(1, 1, 3, dtype=torch.float64)
    copies = pad(torch.arange(3.0)[None, None])[0, 0].long()
    places = (copies == copies.bincount().argmax()).nonzero()[:3, 0]
    rows = torch.zeros(1, len(copies), dtype=torch.float64)
    rows[0, places] = torch.tensor([1e17, 1.0, -1e17], dtype=torch.float64)
    bounds = Bounds(network_of(nn.Sequential(pad, nn.Flatten()), ones), around(ones, torch.full_like(ones, 1e-300)))
    assert float(bounds.lower(rows)) <= 1
    assert float(bounds.lower(-rows)) <= -1


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_convolutions_are_bounded_with_every_padding(mode):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=2, padding_mode=mode)
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)).double().requires_grad_(False)
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    label, captured = int(model(x).argmax()), network_of(model, x)
    exact = float(margin_of(model(x)[0], label))
    assert exact - 1e-9 <= Bounds(captured, Interval(x, x)).margins([label])[0] <= exact
    near = around(x, torch.full_like(x, 0.01))
    [bound] = Bounds(captured, near).margins([label])
    assert bound <= attack_input(model, near, label) < exact


class Apply(nn.Module):
    """A function of the outputs of a convolution, which are not all positive."""

    def __init__(self, function):
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(2, 4, 3)
        self.same = nn.Conv2d(4, 4, (3, 5), padding="same", dilation=(2, 1))

    def forward(self, x):
        return self.function(self.conv(x), self).flatten(1)[:, :4]


FUNCTIONS = {
    "relu6": lambda y, net: functional.relu6(5 * y),
    "hardtanh": lambda y, net: functional.hardtanh(y),
    "clamp": lambda y, net: y.clamp(-0.3, 0.2),
    "clamp from below": lambda y, net: y.clamp(min=-0.1),
    "clamp from above": lambda y, net: y.clamp(max=0.1),
    "clamp_min": lambda y, net: torch.clamp_min(y, 0.1),
    "clamp_max": lambda y, net: torch.clamp_max(y, -0.1),
    "minus": lambda y, net: -y.relu(),
    "one minus": lambda y, net: 1 - y.relu(),
    "chunk": lambda y, net: y.chunk(2, 1)[0].relu() - y.chunk(2, 1)[1],
    "split": lambda y, net: torch.cat(y.relu().split([1, 3], 1)[::-1], 1),
    "split evenly": lambda y, net: torch.cat(y.split(2, -1)[::-1], -1).relu(),
    "padding": lambda y, net: net.same(y.relu()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_bounded_soundly_and_almost_exactly_at_a_point(name):
    torch.manual_seed(0)
    model = Apply(FUNCTIONS[name]).double().requires_grad_(False)
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    scores, captured = model(x)[0], network_of(model, x)
    label = int(scores.argmax())
    exact = float(margin_of(scores, label))
    assert exact - 1e-9 <= Bounds(captured, Interval(x, x)).margins([label])[0] <= exact
    near = around(x, torch.full_like(x, 0.05))
    bounds = Bounds(captured, near)
    [bound] = bounds.margins([label])
    assert bound <= attack_input(model, near, label)
    inside = near.low + (near.high - near.low) * torch.rand(500, *x.shape[1:], dtype=torch.float64)
    low, high = bounds.values[-1]
    assert bool(((model(inside) >= low) & (model(inside) <= high)).all())


REFUSED = {
    "the batch size as a factor": lambda y, net: y / y.shape[0],
    "the batch size as a term": lambda y, net: y - y.shape[0],
    "a negative divisor": lambda y, net: functional.avg_pool2d(y, 2, divisor_override=-1),
    "images joined": lambda y, net: torch.cat([y, y], -4),
    "one value per image": lambda y, net: y.mean((1, 2, 3))[:, None, None, None] + y,
    "pieces of the batch": lambda y, net: torch.cat(y.split(1, 0), 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bounds_is_refused(name):
    with pytest.raises(ModelError, match=r"no bounds for|cannot be captured"):
        network_of(Apply(REFUSED[name]), torch.zeros(1, 2, 6, 6))


class Detached(nn.Module):
    def forward(self, x):
        return 2 * x.detach()


def test_what_is_detached_counts():
    """Functions are transposed by their derivative, which detached values do not have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Detached(), nn.ReLU(), nn.Linear(4, 3)).double().requires_grad_(False)
    x = torch.randn(1, 4, dtype=torch.float64)
    label, near = int(model(x).argmax()), around(x, torch.full_like(x, 0.1))
    [bound] = Bounds(network_of(model, x), near).margins([label])
    share = torch.rand(2000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    least = margin_of(model(near.low + (near.high - near.low) * share.round()), label).min()
    assert bound <= float(least) < float(margin_of(model(x)[0], label))


def test_intervals_suffice_to_exclude_all_of_many_classes():
    layer = nn.Linear(4, 50).double()
    with torch.no_grad():
        layer.bias[7] = 100.0
    x = torch.ones(1, 4, dtype=torch.float64)
    [margin] = Bounds(network_of(nn.Sequential(layer), x), around(x, torch.full_like(x, 0.1))).margins([7])
    assert 90 < margin < 110


@pytest.mark.parametrize("tighten", [False, True])
def test_nothing_is_proven_where_numbers_overflow(tighten):
    layers = [nn.Linear(4, 4, bias=False).double() for _ in range(4)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1e150)
        layers[0].weight[0] = -1e150
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.ReLU(), layers[3])
    x = torch.ones(1, 4, dtype=torch.float64)
    bounds = Bounds(network_of(model, x), around(x, torch.full_like(x, 2.0)), tighten=tighten)
    assert bool(bounds.overflow.all())
    assert bounds.margins([0], optimise=True) == [-float("inf")]


def test_bounds_of_one_network_with_different_changes_do_not_mix():
    model, x = network(3), image(3)[None]
    captured, label = network_of(model, x), int(model(x).argmax())
    changes = {name: WeightBox(torch.full_like(layers[0].weight, 0.1)) for name, layers in captured.layers.items()}
    changed = Bounds(captured, Interval(x, x), changes)
    before = changed.margins([label])
    assert Bounds(captured, Interval(x, x)).margins([label]) > before
    assert changed.margins([label]) == before


@pytest.mark.parametrize("name", CURVES)
def test_lines_and_ranges_of_smooth_functions_hold_everywhere(name):
    rng = random.Random(name)
    for _ in range(200):
        low = rng.uniform(-8, 6)
        high = low + 10 ** rng.uniform(-9, 1.2)
        x = Interval(torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64))
        operator = Smooth(CURVES[name])
        below, start, above, end = operator.lines(x)
        points = torch.linspace(low, high, 1001, dtype=torch.float64)
        values = CURVES[name].function(points)
        assert bool((below * points + start <= values + 1e-15).all())
        assert bool((above * points + end >= values - 1e-15).all())
        bottom, top = operator.interval([x])
        assert bool((bottom <= values).all())
        assert bool((top >= values).all())
        assert float(top - bottom) <= 1.2 * float(values.max() - values.min()) + 0.01 * (high - low) ** 2 + 1e-12


@pytest.mark.parametrize("name", CURVES)
def test_the_curvature_of_smooth_functions_is_bounded(name):
    points = torch.linspace(-12, 12, 200_001, dtype=torch.float64).requires_grad_(True)
    first = torch.autograd.grad(CURVES[name].function(points).sum(), points, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), points)[0]
    assert 0.9 * CURVES[name].curvature - 0.1 <= float(second.abs().max()) <= CURVES[name].curvature


def test_lines_of_relu_hold_as_they_are_rounded():
    rng = random.Random(0)
    ends = [(-(10 ** rng.uniform(-300, 3)), 10 ** rng.uniform(-300, 3)) for _ in range(2000)]
    low, high = torch.tensor(ends, dtype=torch.float64).T
    below, start, above, end = ReLU().lines(Interval(low, high))
    for x in (low, high, torch.zeros_like(low)):
        from_below = below * x + start
        from_above = above * x + end
        assert bool((from_below <= x.clamp(min=0)).all())
        assert bool((from_above * (1 + 1e-15) >= x.clamp(min=0)).all())


def test_normalising_is_bounded_for_vectors_that_cross_zero():
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    x = Interval(low, low + torch.rand(5, 8, generator=generator, dtype=torch.float64))
    operator = Normalise(1, 1e-5, 8)
    below, start, above, end = operator.lines(x)
    bottom, top = operator.interval([x])
    for _ in range(500):
        u = low + (x.high - low) * torch.rand(5, 8, generator=generator, dtype=torch.float64)
        y = u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        assert bool(((bottom <= y) & (y <= top)).all())
        assert bool(((below * u + start <= y) & (y <= above * u + end)).all())


def test_max_pool_follows_a_value_that_is_larger_than_all_others_exactly():
    low = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    low[0, 0, 1, 1] = 5
    x = Interval(low, low + 1)
    operator = MaxPool([2, 2], [2, 2], [0, 0], [1, 1], False)
    rows = -torch.ones(1, 1, 2, 2, dtype=torch.float64)
    [coefficients], constant = operator.backward(rows, [x])
    assert coefficients[0, 0, 1, 1] == -1
    assert coefficients.sum() == -1
    assert float(constant) == pytest.approx(-3)


@pytest.mark.parametrize(
    ("layer", "where"),
    [(nn.Hardswish(), "hardswish in module 1"), (nn.Softmax(1), "softmax"), (nn.PixelShuffle(1), "pixel_shuffle")],
)
def test_an_operator_without_bounds_is_an_error_that_names_the_module(layer, where):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(ModelError, match=f"no bounds for {where}"):
        network_of(model, torch.zeros(1, 4, 6, 6))


def test_products_of_values_have_no_bounds():
    class Gate(nn.Module):
        def forward(self, x):
            return x.sigmoid() * x

    with pytest.raises(ModelError, match=r"no bounds for mul in module 0"):
        network_of(nn.Sequential(Gate(), nn.Linear(4, 2)), torch.zeros(1, 4))
    with pytest.raises(ModelError, match=r"class scores"):
        network_of(nn.Conv2d(4, 2, 1), torch.zeros(1, 4, 6, 6))


def test_time_that_is_up_ends_optimising_and_keeps_what_is_known():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))
    x = torch.zeros(1, 6, dtype=torch.float64)
    captured, box = network_of(model.double().requires_grad_(False), x), Interval(x - 1, x + 1)
    plain = Bounds(captured, box)
    with pytest.raises(OutOfTime):
        Bounds(captured, box, seconds=-1.0)
    late = Bounds(captured, box, steps=4, known=plain.values, seconds=-1.0)
    for one, other in zip(late.values, plain.values, strict=True):
        assert torch.equal(one.low, other.low)
    assert Bounds(captured, box, steps=4, known=plain.values).margins([0]) >= late.margins([0])
