"""Operations with weights: which of them channels can move through."""

import pytest
import torch
from torch import nn

from tests.permute.orders import Odd, images, lively, shuffled

MOVE = {
    "depthwise": (lambda net, x: net.parts["d"](x), {"d": nn.Conv2d(8, 8, 3, groups=8)}),
    "InstanceNorm": (lambda net, x: net.parts["n"](x), {"n": nn.InstanceNorm2d(8, affine=True)}),
    "GroupNorm": (lambda net, x: net.parts["n"](x), {"n": nn.GroupNorm(2, 8)}),
    "LayerNorm of the last": (
        lambda net, x: net.parts["n"](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        {"n": nn.LayerNorm(8)},
    ),
    "a transposed convolution": (lambda net, x: net.parts["t"](x), {"t": nn.ConvTranspose2d(8, 8, 2)}),
    "a layer called twice": (lambda net, x: net.parts["c"](net.parts["c"](x)), {"c": nn.Conv2d(8, 8, 1)}),
}


@pytest.mark.parametrize("name", MOVE)
def test_layers_that_channels_can_move_through(name):
    middle, parts = MOVE[name]
    torch.manual_seed(0)
    net = lively(Odd(middle, **parts))
    difference, free, _ = shuffled(net, images(6))
    assert difference < 1e-12
    assert "last" in free


def test_a_grouped_convolution_lets_channels_move_inside_its_groups_behind_it():
    net = lively(Odd(lambda net, x: net.parts["g"](x), g=nn.Conv2d(8, 8, 1, groups=2)))
    difference, _, channels = shuffled(net, images(6))
    assert difference < 1e-12
    assert channels.along("first.weight", 0)[0].axis.pinned == "read by a grouped convolution"
    assert [(span.axis.size, span.axis.pinned) for span in channels.along("last.weight", 1)] == [(4, None), (4, None)]


def test_a_depthwise_convolution_with_several_outputs_for_each_channel():
    net = lively(Odd(lambda net, x: net.parts["d"](x), made=16, d=nn.Conv2d(8, 16, 3, groups=8)))
    difference, free, channels = shuffled(net, images(6))
    assert difference < 1e-12
    assert "last" in free
    assert [(span.axis.size, span.repeat) for span in channels.along("last.weight", 1)] == [(8, 2)]


def test_a_computed_weight_stays():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 4, 1)))
    difference, _, channels = shuffled(net.double().eval(), images(6))
    assert difference == 0
    assert channels.along("0.weight", 0)[0].axis.pinned == "read by a layer whose weight is computed"
