import copy

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame
from torch import nn
from torch.func import functional_call, jacrev

from halve import select
from halve.errors import DataError
from halve.prune import statistics as module
from halve.prune.statistics import column_means, column_squares, covariance, input_squares, moments, spread
from tests.random_masks import random
from tests.untouched import untouched


def by_derivative(layer, x):
    """What a weight is multiplied with is the output's derivative by it."""
    layer = copy.deepcopy(layer).double()
    weight = layer.weight.detach()
    derivative = jacrev(lambda w: functional_call(layer, {"weight": w}, (x.double(),)))(weight)
    return derivative.square().flatten(0, -weight.dim() - 1).sum(0).float()


def by_unfolding(layer, x):
    pad = [amount for pair in reversed(padding_pairs(layer)) for amount in pair]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    columns = F.unfold(
        F.pad(x.double(), pad, mode=mode), layer.kernel_size, dilation=layer.dilation, stride=layer.stride
    )
    squares = columns.square().sum((0, 2)).reshape(layer.groups, 1, -1, *layer.kernel_size)
    return squares.repeat(1, layer.out_channels // layer.groups, 1, 1, 1).reshape(layer.weight.shape).float()


def padding_pairs(layer):
    if layer.padding == "valid":
        return [(0, 0), (0, 0)]
    if layer.padding == "same":
        spans = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(span // 2, span - span // 2) for span in spans]
    return [(amount, amount) for amount in layer.padding]


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


PLANE = [
    {"kernel_size": 1},
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": (3, 2), "padding": (0, 1), "stride": (2, 3)},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": 3, "dilation": (1, 3), "stride": 2},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 2)},
    {"kernel_size": 2, "padding": "valid", "stride": 2},
    {"kernel_size": 3, "padding": 2, "padding_mode": "circular", "stride": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 4, "padding": "same", "padding_mode": "replicate"},
    {"kernel_size": 1, "stride": 2},
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("options", PLANE, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_exactly_what_unfolding_shows(options, groups):
    layer = nn.Conv2d(4, 2 * groups, groups=groups, **options)
    x = images(2, 4, 7, 8)
    expected = by_unfolding(layer, x)
    torch.testing.assert_close(column_squares(layer, x), expected)
    torch.testing.assert_close(by_derivative(layer, x), expected)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 1), (3, 4)),
        (nn.Linear(4, 1), (2, 5, 3, 4)),
        (nn.Linear(4, 1), (4,)),
        (nn.Conv1d(4, 1, 3, padding=1, stride=2), (2, 4, 9)),
        (nn.Conv1d(4, 2, 4, padding="same", groups=2), (2, 4, 9)),
        (nn.Conv3d(2, 1, (1, 2, 3), padding=(0, 1, 1), stride=(1, 2, 1), dilation=(1, 1, 2)), (2, 2, 2, 4, 5)),
        (nn.ConvTranspose1d(3, 1, 4, stride=2, padding=1), (2, 3, 6)),
        (nn.ConvTranspose1d(3, 1, 3, stride=1, padding=2), (2, 3, 4)),
        (nn.ConvTranspose2d(3, 1, 3), (2, 3, 4, 5)),
        (nn.ConvTranspose2d(3, 1, 2, stride=2), (2, 3, 4, 5)),
        (nn.ConvTranspose2d(3, 1, 3, stride=2, padding=1, output_padding=1), (2, 3, 4, 5)),
        (nn.ConvTranspose2d(3, 1, (3, 4), stride=(3, 1), padding=(2, 3), dilation=(2, 1)), (2, 3, 4, 5)),
        (nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, groups=2), (2, 4, 3, 3)),
        (nn.ConvTranspose2d(3, 1, 2, stride=3, output_padding=2), (1, 3, 2, 3)),
        (nn.ConvTranspose3d(2, 1, 2, stride=(1, 2, 2), padding=(0, 1, 0)), (2, 2, 2, 3, 2)),
        (nn.Conv2d(3, 1, 3, padding=1), (3, 4, 5)),
    ],
    ids=str,
)
def test_every_layer_counts_exactly_what_its_derivative_shows(layer, shape):
    x = images(*shape)
    torch.testing.assert_close(column_squares(layer, x), by_derivative(layer, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_summed_without_overflow(dtype):
    model = nn.Sequential(nn.Linear(8, 2), nn.LayerNorm(2)).to(dtype)
    with untouched(model):
        squares, _ = input_squares(model, select(model).masked, [torch.full((4096, 8), 200.0, dtype=dtype)])
    torch.testing.assert_close(squares["0"], torch.full((2, 8), 4096 * 40000.0))


@pytest.mark.parametrize("size", [7, 8, 2])
def test_a_convolution_that_pads_by_itself_is_counted_with_its_padding(size):
    layer = Conv2dSame(4, 1, 3, stride=2)
    x = images(2, 4, size, size)
    model = nn.Sequential(layer, nn.ReLU())
    squares, _ = input_squares(model, select(model).masked, [x])
    torch.testing.assert_close(squares["0"], by_derivative(layer, x))


def watched():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(128, 2)
    )


def test_the_sums_run_over_all_batches_in_eval_mode():
    model = watched().train()
    first, second = images(3, 4, 4, 4), images(5, 4, 4, 4) + 1
    with untouched(model):
        squares, count = input_squares(model, select(model).masked, [first, (second, torch.zeros(5))])
    assert count == 8
    assert list(squares) == ["0", "3"]
    both = torch.cat([first, second])
    torch.testing.assert_close(squares["0"], by_unfolding(model[0], both))
    inner = copy.deepcopy(model).eval()[:3](both)
    torch.testing.assert_close(squares["3"], by_unfolding(model[3], inner))


def test_forward_decides_what_runs_and_the_output_counts_the_images():
    model = watched()
    data = [{"left": images(3, 4, 4, 4), "right": images(3, 4, 4, 4)}]
    squares, count = input_squares(model, select(model).masked, data, lambda m, b: m(b["left"] + b["right"]))
    assert count == 3
    torch.testing.assert_close(squares["0"], by_unfolding(model[0], 2 * images(3, 4, 4, 4)))


def test_layers_that_share_a_weight_add_up():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight = model[0].weight
    x = images(3, 4)
    squares, _ = input_squares(model, select(model).masked, [x])
    torch.testing.assert_close(squares["0"], ((x**2).sum(0) + (model[0](x).detach() ** 2).sum(0)).expand(4, 4))


def test_an_input_given_by_keyword_is_seen_and_a_layer_that_does_not_run_is_left_out():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.used(input=x))

    model, x = Keyword(), images(3, 4)
    squares, _ = input_squares(model, select(model).masked, [x])
    assert list(squares) == ["used"]
    torch.testing.assert_close(squares["used"], (x**2).sum(0).expand(4, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused_by_the_layers_name(bad):
    model, x = watched(), images(3, 4, 4, 4)
    x[0, 0, 0, 0] = bad
    with untouched(model), pytest.raises(DataError, match="layer 0 gets NaN or infinite inputs"):
        input_squares(model, select(model).masked, [x])


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
def test_moments_give_the_mean_and_the_variance_of_the_outputs(layer, shape):
    x, groups = random(*shape) + 0.5, getattr(layer, "groups", 1)
    output = layer(x).detach()
    weight = layer.weight.detach().reshape(groups, len(layer.weight) // groups, -1)
    totals, there = moments(layer, x, torch.Generator()), spread(layer, output)
    means = totals[:, :-1, -1] / totals[:, -1:, -1]
    torch.testing.assert_close(means, column_means(layer, x, output))
    torch.testing.assert_close((weight @ means[:, :, None]).flatten(), there.mean)
    inner = torch.stack([covariance(total) for total in totals])
    torch.testing.assert_close(((weight @ inner) * weight).sum(2).flatten(), there.variance, rtol=1e-4, atol=1e-5)


def test_large_images_contribute_a_sample_of_their_positions():
    layer, x = nn.Conv2d(4, 4, 3), random(1, 4, 40, 40)
    one, same, other = (moments(layer, x, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one[0, -1, -1] == module._POSITIONS
    assert 0.5 < one[0].diagonal()[:-1].sum() / (9 * module._POSITIONS * 4) < 2
