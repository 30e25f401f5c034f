import pytest
import torch
from torch import nn

import halve
from halve.find import reconstruct as module
from halve.find.reconstruct import choose, fits, gram, squares_of
from halve.masks.layout import Layout
from halve.masks.mask import Mask
from halve.masks.pattern import Pattern
from tests.untouched import untouched


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LAYERS = [
    (nn.Linear(8, 6, bias=False), (5, 3, 8)),
    (nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False), (2, 8, 9, 7)),
    (nn.Conv2d(8, 6, (3, 2), dilation=2, groups=2, padding="same", bias=False), (2, 8, 9, 7)),
    (nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular", bias=False), (2, 8, 5, 5)),
    (nn.Conv2d(8, 4, 3, bias=False), (8, 5, 5)),
    (nn.Conv1d(8, 6, 3, padding="valid", bias=False), (2, 8, 9)),
    (nn.Conv3d(4, 2, 2, bias=False), (2, 4, 4, 4, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_the_gram_matrix_gives_the_energy_of_the_outputs(layer, shape):
    x, groups = random(*shape), getattr(layer, "groups", 1)
    weight = layer.weight.detach().reshape(groups, layer.weight.shape[0] // groups, -1)
    energy = ((weight @ gram(layer, x, torch.Generator())) * weight).sum()
    torch.testing.assert_close(energy, layer(x).detach().square().sum())


def test_large_images_contribute_a_sample_of_their_positions():
    layer, x = nn.Conv2d(4, 4, 3), random(1, 4, 40, 40)
    one, same, other = (gram(layer, x, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0.5 < one.diagonal(dim1=1, dim2=2).sum() / (9 * module._POSITIONS * 4) < 2


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

    def error(mask):
        run = torch.func.functional_call(layer, {"weight": mask.put_on(weight)}, (x,))
        return float((run - layer(x)).detach().square().sum() / layer(x).detach().square().sum())

    grams = gram(layer, x, torch.Generator())
    start = Mask.from_scores(rule, layout, weight.abs())
    kept, left = choose(weight, layout, rule, grams, start.kept())
    mask = Mask.from_kept(rule, layout, kept)
    assert error(mask) < error(start)
    assert left == pytest.approx(error(mask), rel=1e-3)
    codes = mask.codes
    for row, block in [(0, 0), (1, layout.blocks - 1), (layout.rows - 1, layout.blocks // 2)]:
        for code in range(rule.count):
            other = codes.clone()
            other[row, block] = code
            try:
                changed = Mask(rule, layout, other)
            except halve.HalveError:
                continue  # it would waste a place on a virtual column
            assert error(changed) >= error(mask) - 1e-6


def test_the_diagonals_are_the_squares_of_each_weights_inputs():
    layer, x = nn.Conv2d(8, 6, 3, groups=2, bias=False), random(3, 8, 6, 6)
    from halve.find.activations import column_squares

    layout = Layout("conv", tuple(layer.weight.shape), 4, 2)
    torch.testing.assert_close(squares_of(gram(layer, x, torch.Generator()), layout), column_squares(layer, x))


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
        assert halve.verify(model, masks).ok
        with torch.no_grad():
            errors[score] = float((halve.apply(model, masks)(x) - model(x)).square().sum())
    assert errors["reconstruct"] < 0.9 * min(errors["magnitude"], errors["wanda"])


def test_it_is_reproducible_and_starts_learning():
    model, x = net(), correlated(16)
    first, second = (halve.prune(model, "reconstruct", [x]) for _ in range(2))
    assert first == second
    learned = halve.learn(model, [x], steps=1, lr=1e-6, start="reconstruct")
    assert learned.difference(first) == 0


def test_layers_that_cannot_be_reconstructed_fall_back(monkeypatch):
    class Padded(nn.Conv2d):
        def forward(self, x):
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    model = nn.Sequential(Padded(8, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)).eval()
    assert [fits(layer) for layer in model[:3]] == [False, False, True]
    x = correlated(8)
    masks, wanda = halve.prune(model, "reconstruct", [x]), halve.prune(model, "wanda", [x])
    assert masks["0"].difference(wanda["0"]) == masks["1"].difference(wanda["1"]) == 0
    monkeypatch.setattr(module, "MAX_COLUMNS", 4)
    assert not fits(model[2])
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
    assert halve.verify(model, halve.prune(model, "reconstruct", [correlated(8)])).ok
