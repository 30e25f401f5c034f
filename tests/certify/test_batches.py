"""Several images at once, also on a GPU: the bounds are those of each image by itself."""

import pytest
import torch
from torch import nn

import halve
from benchmarks.soundness import image, network
from halve.certify import crown
from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds, Choices
from halve.certify.margins import proven_margins
from halve.certify.network import network_of
from halve.certify.rounding import Interval, around
from halve.sources.digits import digits, train_digits

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


def pictures(seed):
    return torch.stack([image(100 * seed + i) for i in range(3)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 3, 9])
def test_bounds_of_inputs_are_those_of_each_image(seed, device):
    model, x = network(seed), pictures(seed)
    labels, box = model(x).argmax(1).tolist(), around(x, torch.full_like(x, 0.01))
    captured = network_of(model, x[:1])
    alone = [
        proven_margins(captured, Interval(box.low[i, None], box.high[i, None]), {}, [label], False)[0].bound
        for i, label in enumerate(labels)
    ]
    there = Interval(box.low.to(device), box.high.to(device))
    together = proven_margins(network_of(model.to(device), x[:1]), there, {}, labels, False)
    assert [one.bound for one in together] == pytest.approx(alone, abs=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 3, 9])
def test_bounds_of_weights_are_those_of_each_image_with_its_own_scale(seed, device):
    model, x = network(seed), pictures(seed)
    labels, sizes = model(x).argmax(1).tolist(), [1e-3, 1e-2, 1e-4]
    captured = network_of(model, x[:1])
    radii = {name: layers[0].weight.abs() for name, layers in captured.layers.items()}
    alone = []
    for one, label, size in zip(x, labels, sizes, strict=True):
        changes = {name: WeightBox(size * radius) for name, radius in radii.items()}
        alone += Bounds(captured, Interval(one[None], one[None]), changes).margins([label])
    there, scale = x.to(device), torch.tensor(sizes, dtype=torch.float64, device=device)
    changes = {name: WeightBox(radius.to(device), scale) for name, radius in radii.items()}
    bounds = Bounds(network_of(model.to(device), x[:1]), Interval(there, there), changes)
    assert bounds.margins(labels) == pytest.approx(alone, abs=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_optimised_slopes_are_better_and_any_slopes_are_sound(device):
    torch.manual_seed(0)
    convs = nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    model = nn.Sequential(*convs, nn.Flatten(), nn.Linear(288, 3)).double().to(device).requires_grad_(False)
    x = image(3)[None].to(device)
    box = around(x, torch.full_like(x, 0.2))
    bounds = Bounds(network_of(model, x), box)
    rows = torch.tensor([[1.0, -1, 0], [0, 1, -1]], dtype=torch.float64, device=device)
    plain, best = bounds.lower(rows), bounds.optimised(rows, -1, None, 20, 0.1)
    assert bool((best > plain + 0.01).any())
    inside = Bounds(bounds.network, box, steps=4, known=bounds.values)
    assert all(bool((new.low >= old.low).all()) for new, old in zip(inside.values, bounds.values, strict=True))
    generator = torch.Generator().manual_seed(0)
    points = box.low + (box.high - box.low) * torch.rand(500, *x.shape[1:], generator=generator).to(x)
    found = (model(points) @ rows.T).amin(0)
    assert bool((torch.maximum(best, inside.lower(rows)) <= found).all())
    wild = {
        at: torch.randn(2, *bounds.values[at].low.shape[1:], generator=generator).to(x) * 3
        for at, node in enumerate(bounds.network.nodes)
        if type(node.operator).__name__ == "ReLU"
    }
    assert bool((bounds.lower(rows, choices=Choices(wild, {})) <= found).all())


def test_an_image_that_overflows_leaves_the_others_alone():
    model, x = network(3), pictures(3)
    labels, captured = model(x).argmax(1).tolist(), network_of(model, x[:1])
    x[1] *= 1e308
    bounds = Bounds(captured, around(x, torch.full_like(x, 1e-3)))
    alone = Bounds(captured, around(x[::2], torch.full_like(x[::2], 1e-3))).margins(labels[::2])
    assert bounds.overflow.tolist() == [False, True, False]
    assert bounds.margins(labels) == [pytest.approx(alone[0]), -float("inf"), pytest.approx(alone[1])]


def linear(weight, bias):
    layer = nn.Linear(len(weight[0]), len(weight)).double().requires_grad_(False)
    layer.weight.data, layer.bias.data = (torch.tensor(one, dtype=torch.float64) for one in (weight, bias))
    return layer


def test_intervals_that_overflow_are_not_used_by_the_next_round(monkeypatch):
    """Intervals that are twice as wide as the values exceed the largest number, those of the next round do not."""
    once, back = linear([[1, 1], [1, -1]], [10, 10]), linear([[0.5, 0.5], [0.5, -0.5]], [-8.5, 1.5])  # x + 1.5
    split = linear([[10, 0], [10, 0]], [25, -15])  # v + 40 and v, for v = 10 times the first input
    model = nn.Sequential(once, nn.ReLU(), back, nn.ReLU(), split, nn.ReLU(), linear([[1, 0], [0, 1]], [-35, 0]))
    x = torch.zeros(1, 2, dtype=torch.float64)
    captured, box = network_of(model, x), Interval(x - 1, x + 1)
    monkeypatch.setattr(crown, "LARGEST", 55.0)
    assert [bool(Bounds(captured, box, tighten=tighten).overflow) for tighten in (False, True)] == [True, False]
    [found] = proven_margins(captured, box, {}, [0], False)
    assert found.bound <= float(model(torch.tensor([[-1.0, 0]], dtype=torch.float64)) @ x.new_tensor([1, -1]))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.cat([self.one(x).relu(), self.other(x).relu()], 1))


def test_slopes_of_other_branches_are_left_alone():
    """The second branch has no ReLU before it whose slope could be optimised, only one beside it."""
    torch.manual_seed(0)
    model, x = Branches().double().requires_grad_(False), torch.zeros(1, 4, dtype=torch.float64)
    captured, box = network_of(model, x), Interval(x - 1, x + 1)
    plain, inside = Bounds(captured, box), Bounds(captured, box, steps=2)
    for one, other in zip(inside.values, plain.values, strict=True):
        assert torch.allclose(one.low, other.low)


@pytest.mark.gpu
@NEEDS_GPU
def test_certificates_of_a_trained_network_on_a_gpu_are_those_of_the_cpu():
    """Updates of the last layers, and both networks together where one is not proven to keep the class."""
    pytest.importorskip("sklearn")
    model = train_digits(epochs=1).eval()
    masks, images = halve.prune(model), digits("test").tensors[0][:100]
    with torch.no_grad():
        x = images[model(images).argmax(1) == halve.apply(model, masks)(images).argmax(1)][:2]
    tail = [list(masks)[-1], next(name for name in network_of(model, x[:1]).layers if name not in masks)]
    for size in (1e-3, 0.3):  # weights differ from machine to machine, but at 0.3 nothing is proven
        options = {"reuse": size, "layers": tail, "agreement": True, "optimise": False, "progress": False}
        here = halve.certify(model, masks, x, **options)
        there = halve.certify(model, masks, x, device="cuda", **options)
        assert here.result["agree"] == 2
        assert here.result["largest_lead"] > 0 or size < 0.3
        for one, other in zip(here.result["per_image"], there.result["per_image"], strict=True):
            assert one["certified"] == other["certified"]
            assert one.get("lead") == pytest.approx(other.get("lead"), rel=1e-6)
            assert one["margin"] == pytest.approx(other["margin"], rel=1e-6, abs=1e-9)
