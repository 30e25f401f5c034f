import pytest
import torch
from torch import nn

from halve.prune import moments as module
from halve.prune.moments import column_means, covariance, moments, spread
from tests.random_masks import random

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
def test_they_give_the_mean_and_the_variance_of_the_outputs(layer, shape):
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
