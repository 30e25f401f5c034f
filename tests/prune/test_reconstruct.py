import pytest
import torch
from torch import nn

import halve
from halve.masks.layout import Layout
from halve.masks.mask import Mask
from halve.masks.pattern import Pattern
from halve.prune import reconstruct as module
from halve.prune.reconstruct import can_reconstruct, choose, costs_of, rows_of, squares_of
from halve.prune.sequential import Drift
from halve.prune.statistics import column_means, column_squares, covariance, moments, spread
from tests.random_masks import random
from tests.untouched import untouched


@pytest.mark.parametrize(
    ("layer", "shape", "pattern", "options"),
    [
        (nn.Conv2d(8, 6, 3, padding=1, bias=False), (8, 8, 6, 6), "2:4", {}),
        (nn.Conv2d(8, 6, 3, padding=1, bias=False), (8, 8, 6, 6), "1:4", {"order": "flat"}),
        (nn.Conv2d(6, 4, 3, bias=False), (8, 6, 6, 6), "2:4", {"pad": True}),
        (
            nn.Conv2d(16, 8, 1, groups=2, bias=False),
            (8, 16, 6, 6),
            "2:4",
            {"channel_order": (*range(7, -1, -1), *range(8))},
        ),
        (nn.Linear(16, 8, bias=False), (64, 16), "4:8", {}),
    ],
    ids=["conv", "flat", "padded", "grouped and permuted", "4:8"],
)
def test_no_single_block_could_be_chosen_better(layer, shape, pattern, options):
    rule, weight = Pattern(pattern), layer.weight.detach()
    kind = "linear" if isinstance(layer, nn.Linear) else "conv"
    layout = Layout(kind, tuple(weight.shape), rule.size, getattr(layer, "groups", 1), **options)
    x = random(*shape)
    x = x @ random(shape[-1], shape[-1], seed=1) if kind == "linear" else x + x.roll(1, 1) + x.roll(2, 1)

    totals = moments(layer, x, torch.Generator())
    drift = Drift(
        random(layout.groups, totals.shape[1] - 1, seed=2), random(len(weight), seed=3), 1 + random(len(weight)) / 9
    )

    def cost(mask):
        removed = rows_of(weight * ~mask.kept(), layout)
        each = [group.of(part) for group, part in zip(costs_of(weight, layout, totals, drift), removed, strict=True)]
        return torch.cat(each)

    start = Mask.from_scores(rule, layout, weight.abs())
    mask = Mask(rule, layout, choose(weight, layout, rule, totals, start.codes, drift))
    least = cost(mask)
    assert (least <= cost(start) + 1e-6).all()
    assert least.sum() < cost(start).sum()
    for row, block in [(0, 0), (1, layout.blocks - 1), (layout.rows - 1, layout.blocks // 2)]:
        for code in range(rule.count):
            other = mask.codes
            other[row, block] = code
            try:
                changed = Mask(rule, layout, other)
            except halve.HalveError:
                continue  # it would waste a place on a virtual column
            assert cost(changed)[row] >= least[row] - 1e-5


def test_a_row_pays_for_its_error_and_for_what_its_mean_and_deviation_are_off():
    layer, x = nn.Conv2d(8, 6, 3, groups=2, bias=False), random(64, 8, 6, 6) + 1
    given = 0.9 * x + 0.02 * random(64, 8, 6, 6, seed=1)  # what the masked layers before it give
    weight, layout = layer.weight.detach(), Layout("conv", (6, 4, 3, 3), 4, 2)
    kept = Mask.from_scores(Pattern("2:4"), layout, weight.abs()).apply_to(weight)

    def outputs(weight, x):
        return nn.functional.conv2d(x, weight, groups=2)

    dense, now = (spread(layer, outputs(weight, inputs)) for inputs in (x, given))
    drift = Drift(column_means(layer, given, layer(given)), dense.mean - now.mean, now.variance / dense.variance)
    totals = moments(layer, x, torch.Generator())
    parts = zip(costs_of(weight, layout, totals, drift), rows_of(weight - kept, layout), strict=True)
    found = torch.cat([cost.of(part) for cost, part in parts]) + module.MEAN * drift.missing.square()

    left = outputs(weight - kept, x).movedim(1, 0).flatten(1)
    shared = ((left - left.mean(1, keepdim=True)) * outputs(weight, x).movedim(1, 0).flatten(1)).mean(1)
    off = spread(layer, outputs(kept, given)).mean - dense.mean
    weaker = (dense.variance - now.variance) / 2 + shared
    variances = torch.stack([covariance(total).diagonal().mean() for total in totals]).repeat_interleave(3)
    ridge = module.RIDGE * variances * (weight - kept).square().sum((1, 2, 3))
    gain = module.GAIN * weaker.square() / dense.variance
    expected = left.var(1, correction=0) + ridge + module.MEAN * off.square() + gain
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_diagonals_are_the_squares_of_each_weights_inputs():
    layer, x = nn.Conv2d(8, 6, 3, groups=2, bias=False), random(3, 8, 6, 6)
    layout = Layout("conv", tuple(layer.weight.shape), 4, 2)
    torch.testing.assert_close(squares_of(moments(layer, x, torch.Generator()), layout), column_squares(layer, x))


def correlated(n=96):
    x = random(n, 8, 8, 8)
    return torch.einsum("nchw,cd->ndhw", x, random(8, 8, seed=3))


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.Flatten(),
        nn.Linear(576, 4),
    ).eval()


def test_pruning_by_reconstruction_beats_magnitude_and_wanda_and_touches_nothing():
    model, x = net(), correlated()
    errors = {}
    for score in ("magnitude", "wanda", "reconstruct"):
        with untouched(model):
            masks = halve.prune(model, score, [x])
        assert halve.verify(halve.apply(model, masks), masks).ok
        with torch.no_grad():
            errors[score] = float((halve.apply(model, masks)(x) - model(x)).square().sum())
    assert errors["reconstruct"] < 0.9 * min(errors["magnitude"], errors["wanda"])


@pytest.fixture(scope="module")
def deep():
    torch.manual_seed(0)
    layers = [(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*(layer for three in layers for layer in three))
    for _ in range(20):
        model(random(32, 16, 6, 6))
    return model.eval()


def test_frozen_batchnorm_gets_outputs_that_are_as_strong_as_before(deep, monkeypatch):
    model, x = deep, random(64, 16, 6, 6, seed=1)
    strengths = []
    for gain in (0.0, module.GAIN):
        monkeypatch.setattr(module, "GAIN", gain)
        masked = halve.apply(model, halve.prune(model, "reconstruct", random(128, 16, 6, 6).split(32), also="*"))
        with torch.no_grad():
            strengths.append(float(masked(x).std() / model(x).std()))
    assert abs(strengths[1] - 1) < 0.6 * abs(strengths[0] - 1)


def test_masks_for_recalibrated_statistics_change_the_centred_outputs_least(deep):
    model, x = deep, random(128, 16, 6, 6).split(32)
    there = halve.prune(model, "reconstruct", x, recalibrate=True, also="*")
    other = halve.recalibrate(model, halve.prune(model, "reconstruct", x, also="*"), x)
    assert there.statistics
    with torch.no_grad():
        error, more = ((halve.apply(model, masks)(x[0]) - model(x[0])).square().sum() for masks in (there, other))
    assert error < more


def test_it_is_reproducible_and_starts_learning():
    model, x = net(), correlated(16)
    first, second = (halve.prune(model, "reconstruct", [x]) for _ in range(2))
    assert first == second
    learned = halve.learn(model, [x], steps=1, lr=1e-6, start="reconstruct", permute=False, validation=False)
    assert learned.difference(first) == 0


def test_layers_that_cannot_be_reconstructed_fall_back(monkeypatch):
    class Padded(nn.Conv2d):
        def forward(self, x):
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    model = nn.Sequential(Padded(8, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)).eval()
    assert [can_reconstruct(layer) for layer in model[:3]] == [False, False, True]
    x = correlated(8)
    masks, wanda = halve.prune(model, "reconstruct", [x]), halve.prune(model, "wanda", [x])
    assert masks["0"].difference(wanda["0"]) == masks["1"].difference(wanda["1"]) == 0
    monkeypatch.setattr(module, "MAX_COLUMNS", 4)
    assert not can_reconstruct(model[2])
    assert halve.prune(model, "reconstruct", [x], pattern="8:8").density == 1
    assert halve.prune(net(), "reconstruct", [x], pattern="5:16", also="*").density == pytest.approx(5 / 16)


def test_inputs_that_are_not_finite_are_named():
    x = correlated(8)
    x[0, 0, 0, 0] = float("nan")
    with pytest.raises(halve.HalveError, match="layer 0 gets NaN"):
        halve.prune(net(), "reconstruct", [x])


def test_a_weight_that_another_kind_of_layer_shares_is_scored_all_the_same():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.norm = nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3), nn.BatchNorm2d(8)
            self.up.weight = self.down.weight

        def forward(self, x):
            return self.norm(self.up(self.down(x)))

    model = Tied().eval()
    masks = halve.prune(model, "reconstruct", [correlated(8)])
    assert halve.verify(halve.apply(model, masks), masks).ok
