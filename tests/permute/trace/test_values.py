"""Weights that are read in other ways than by their layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.permute.orders import images, lively, shuffled


class Tied(nn.Module):
    """Weights that are read in other ways than by their layer."""

    def __init__(self, how):
        super().__init__()
        self.a, self.e, self.z = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)
        self.w = nn.Parameter(torch.rand(8, 4, 1, 1))
        self.table = nn.Parameter(torch.rand(1, 8, 6, 1))
        self.attention = nn.Conv2d(4, 1, 1)
        self.wide = nn.Conv2d(12, 8, 1)
        self.register_buffer("fixed", torch.linspace(0.1, 2, 8).reshape(1, 8, 1, 1), persistent=False)
        self.how = how

    def forward(self, x):
        return self.z(self.how(self, x))


TIED = {
    "a weight transposed": lambda net, x: F.conv2d(net.e(net.a(x)), net.e.weight.transpose(0, 1)),
    "an entry of a table": lambda net, x: net.a(x) + net.table + net.table[0, 2, 0, 0],
    "the same weight grouped": lambda net, x: F.conv2d(x, net.w) + F.conv2d(net.a(x), net.w, groups=2),
    "the same weight grouped, the other way round": lambda net, x: (
        F.conv2d(net.a(x), net.w, groups=2) + F.conv2d(x, net.w)
    ),
    "attention on the input": lambda net, x: net.wide(torch.cat([net.a(x), x * net.attention(x).sigmoid()], 1)).relu(),
    "attention first, cut": lambda net, x: torch.cat([x * net.attention(x).sigmoid(), net.a(x)], 1)[:, :8],
    "a buffer that no checkpoint holds": lambda net, x: net.e(net.a(x) * net.fixed),
    "nothing joined": lambda net, x: torch.cat([torch.empty(0, dtype=x.dtype), net.a(x)], 1),
    "over its deviation": lambda net, x: net.a(x) / net.a(x).std(False),
}


@pytest.mark.parametrize("name", TIED)
def test_weights_that_are_read_in_other_ways_too(name):
    torch.manual_seed(0)
    net = lively(Tied(TIED[name]))
    difference, _, channels = shuffled(net, images(6))
    assert difference < 1e-12
    assert channels.along("fixed", 1) is None
