"""Operations without weights: which of them channels can move through."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.permute.orders import Odd, images, lively, shuffled

MOVE = {
    "nothing": (lambda net, x: x, {}),
    "a gain for each channel": (lambda net, x: x * net.gain, {}),
    "a table over channels and rows": (lambda net, x: x + net.table, {}),
    "a gate": (lambda net, x: x * net.parts["gate"](x).sigmoid(), {"gate": nn.Conv2d(8, 8, 1)}),
    "one gate for all channels": (lambda net, x: x * net.parts["gate"](x), {"gate": nn.Conv2d(8, 1, 1)}),
    "PReLU": (lambda net, x: net.parts["p"](x), {"p": nn.PReLU(8)}),
    "softmax over channels": (lambda net, x: x.softmax(1), {}),
    "over the norm of all channels": (lambda net, x: x / x.norm(dim=1, keepdim=True), {}),
    "less the mean of all channels": (lambda net, x: x - x.mean((1, 2, 3), keepdim=True), {}),
    "halves swapped": (lambda net, x: torch.cat(x.chunk(2, 1)[::-1], 1), {}),
    "halves added": (lambda net, x: torch.cat([x[:, :4] + x[:, 4:], x[:, :4]], 1), {}),
    "channels cut and padded": (lambda net, x: F.pad(x[:, 2:6], (0, 0, 0, 0, 1, 3)), {}),
    "reflected pixels": (lambda net, x: F.pad(x, (1, 1, 1, 1), mode="reflect"), {}),
    "resized": (lambda net, x: F.interpolate(x, scale_factor=2, mode="bilinear"), {}),
    "transposed pixels": (lambda net, x: x.transpose(2, 3), {}),
    "pixels in a row and back": (lambda net, x: x.flatten(2).unflatten(2, (6, 6)), {}),
    "in place": (lambda net, x: x.mul_(2).relu_().add_(1), {}),
}


@pytest.mark.parametrize("name", MOVE)
def test_operations_that_channels_can_move_through(name):
    middle, parts = MOVE[name]
    torch.manual_seed(0)
    net = lively(Odd(middle, **parts))
    difference, free, _ = shuffled(net, images(6))
    assert difference < 1e-12
    assert "last" in free


STAY = {
    "channels rolled": (lambda net, x: x.roll(1, 1), {}),
    "channels flipped": (lambda net, x: x.flip(1), {}),
    "channels shuffled": (lambda net, x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2), {}),
    "every other channel": (lambda net, x: torch.cat([x[:, ::2], x[:, 1::2]], 1), {}),
    "summed up along channels": (lambda net, x: x.cumsum(1), {}),
    "reflected channels": (lambda net, x: F.pad(x, (0, 0, 0, 0, 1, 1), mode="reflect")[:, 1:9], {}),
    "pooled channels": (lambda net, x: F.avg_pool2d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2), {}),
    "a channel selected": (lambda net, x: x + x[:, 3].unsqueeze(1), {}),
    "pixels as channels": (
        lambda net, x: x + x.mean((2, 3)).unsqueeze(1).unsqueeze(1).expand(-1, 8, 6, 8)[..., :6],
        {},
    ),
    "a constant for each channel": (lambda net, x: x * torch.arange(8.0, dtype=x.dtype).reshape(1, 8, 1, 1), {}),
    "an index": (lambda net, x: x[:, [7, 6, 5, 4, 3, 2, 1, 0]], {}),
}


@pytest.mark.parametrize("name", STAY)
def test_operations_that_know_where_a_channel_is_keep_it_there(name):
    middle, parts = STAY[name]
    torch.manual_seed(0)
    net = lively(Odd(middle, **parts))
    difference, free, _ = shuffled(net, images(6))
    assert difference < 1e-12
    assert "last" not in free


def test_a_channel_that_is_used_on_its_own_stays_and_the_others_may_move():
    net = lively(Odd(lambda net, x: x * x[:, 2:3]))
    difference, _, channels = shuffled(net, images(6))
    assert difference < 1e-12
    assert [span.axis.size for span in channels.along("last.weight", 1)] == [2, 1, 5]


def test_slopes_of_prelu_lie_along_dimension_one_whatever_the_channels_do():
    net = nn.Sequential(nn.Linear(4, 8), nn.PReLU(8), nn.Linear(8, 4))
    difference, free, _ = shuffled(lively(net), torch.randn(2, 8, 4, dtype=torch.float64))
    assert difference < 1e-12
    assert "2" in free


def test_a_flattened_image_moves_pixels_with_their_channel():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 12), nn.Linear(12, 3))
    difference, free, channels = shuffled(lively(net), images(6))
    assert difference < 1e-12
    assert free == {"3", "4"}
    assert [(span.axis.size, span.repeat) for span in channels.along("3.weight", 1)] == [(8, 16)]
