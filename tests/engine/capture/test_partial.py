import copy

import pytest
import torch
from torch import nn

import halve
from tests.engine.nets import compiled, same, sparsely
from tests.tiny import images


class Head(nn.Module):
    """Its output depends on an argument and on the image size."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(4, 4, 3, padding=1), 3

    def forward(self, x, twice=False):
        y = self.conv(x)
        y = y * 5 if x.shape[2] > 6 else y
        return y * 2 if twice else y


class Net(nn.Module):
    """Branches on values, so that its parts are captured separately; `how` calls them."""

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
}


@pytest.mark.parametrize("name", HOW)
def test_a_part_may_be_called_with_other_arguments(name):
    how, noted = HOW[name]
    model = Net(how).eval()
    masks = halve.prune(model, also="pair.0")
    fast = sparsely(compiled(model, masks))
    assert "parts" in fast.plan.uncompiled["the network"]
    assert any(layer.is_2_4 for layer in fast.layers)
    assert ("head" in fast.plan.uncompiled) == noted  # every fallback is reported
    for count in (1, 2, 5):
        x = images(count, seed=count)
        with torch.no_grad():
            expected = halve.apply(model, masks)(x)
        for network in (fast, copy.deepcopy(fast)):
            torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)


def test_code_that_reads_attributes_of_a_part_falls_back_to_eager():
    fast = same(Net(lambda n, x: n.pair(n.head(x)) * n.head.scale), images(2))
    assert "needs the original module" in fast.plan.uncompiled["head"]
    assert not fast.layers


class Outer(nn.Module):
    """Cannot be captured as one graph."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.pair, self.how = Inner(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), how

    def forward(self, x):
        y = self.how(self, self.pair(self.inner(x)), x)
        return y + float(y.sum()) * 0


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(4, 4, 1), 1.0

    def forward(self, x):
        return self.conv(x) * self.scale if x.shape[0] > 1 else self.conv(x) * 2


def louder(net, y, x):
    net.inner.scale = 3.0
    y = y + net.inner(x)
    net.inner.scale = 1.0
    return y


def test_a_part_whose_state_changes_between_calls_falls_back_to_eager():
    fast = same(Outer(louder), images(2), calls=2)
    assert "does not match the module" in fast.plan.uncompiled["inner"]
    assert "pair" not in fast.plan.uncompiled
    assert [layer.name for layer in fast.layers] == ["pair.0"]


def test_a_part_that_treats_single_images_differently_runs_them_eagerly():
    model = Outer(lambda net, y, x: y).eval()
    fast = same(model, images(2))
    for count in (1, 2, 3):
        with torch.no_grad():
            torch.testing.assert_close(fast(images(count)), model(images(count)))
    assert {layer.name for layer in fast.layers} == {"inner.conv", "pair.0"}


def test_a_part_that_changes_its_buffers_or_inputs_falls_back_to_eager():
    class Counting(Inner):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.conv(x) + self.calls

    class Writing(Inner):
        def forward(self, x):
            return self.conv(x.mul_(2))

    for inner, why in ((Counting(), "changes its buffers"), (Writing(), "changes its inputs")):
        model = Outer(lambda net, y, x: y + x)
        model.inner = inner
        fast = same(model, images(2), calls=3)
        assert why in fast.plan.uncompiled["inner"]
        assert "pair" not in fast.plan.uncompiled
