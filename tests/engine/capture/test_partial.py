import copy

import pytest
import torch
from torch import nn

import halve
from tests.engine.nets import compiled, sparsely
from tests.tiny import images


class Head(nn.Module):
    """What it computes depends on an argument and on the size of the images."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(4, 4, 3, padding=1), 3

    def forward(self, x, twice=False):
        y = self.conv(x)
        y = y * 5 if x.shape[2] > 6 else y
        return y * 2 if twice else y


class Net(nn.Module):
    """Looks at its numbers, so that its parts are captured one by one; `how` calls them."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.pair = Head(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.how = how

    def forward(self, x):
        return self.how(self, x if x.mean() > -1e9 else -x)


HOW = {
    "with another argument": (lambda n, x: n.head(x) + n.head(x, True), True),
    "with another value": (lambda n, x: n.head(x, twice=False) + n.head(x, twice=True), True),
    "with another size": (lambda n, x: n.head(x).mean((2, 3)) + n.head(x[:, :, ::2, ::2]).mean((2, 3)), True),
    "with another number of images": (lambda n, x: n.pair(n.head(x))[:1] + n.pair(n.head(x[:1])), False),
    "and looked into": (lambda n, x: n.pair(n.head(x)) * n.head.scale + n.pair[0].weight.mean(), False),
}


@pytest.mark.parametrize("name", HOW)
def test_a_part_is_called_as_the_network_likes(name):
    how, noted = HOW[name]
    model = Net(how).eval()
    masks = halve.prune(model, also="pair.0")
    fast = sparsely(compiled(model, masks))
    assert "parts" in fast.plan.left["the network"]
    assert any(layer.halved for layer in fast.layers)
    assert ("head" in fast.plan.left) == noted  # nothing is slower in silence
    for count in (1, 2, 5):
        x = images(count, seed=count)
        with torch.no_grad():
            expected = halve.apply(model, masks)(x)
        for network in (fast, copy.deepcopy(fast)):
            torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)
