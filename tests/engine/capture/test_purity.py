"""Networks that hold more than weights, and code that looks at what it calls."""

import pytest
import torch
from torch import nn

import halve
from tests.engine.nets import Net, compiled, same
from tests.tiny import images


def test_complex_numbers_stay_complex():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 4)
            self.register_buffer("angles", torch.polar(torch.ones(5, 8), torch.rand(5, 8)))

        def forward(self, x):
            turned = torch.view_as_complex(self.q(x).unflatten(-1, (8, 2))) * self.angles
            return self.o(torch.view_as_real(turned).flatten(-2))

    same(Rotated(), torch.randn(2, 5, 16))


def test_views_of_images_that_lie_channels_last():
    same(Net(lambda n, x: n.b(n.a(x)).view(x.size(0), -1)), images(2))
    last = images(2).contiguous(memory_format=torch.channels_last)
    fast = compiled(Net(lambda n, x: n.b(n.a(x)).view(x.size(0), -1)).eval(), halve.MaskSet({}), last)
    torch.testing.assert_close(fast(last), fast(images(2)))
    fast = same(Net(lambda n, x: n.a(x).as_strided((2, 4), (256, 1))), images(2))
    assert "by strides" in fast.plan.left["the network"]


class Counting(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.conv, self.norm, self.how = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), how
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.conv(x)
        if self.how == "in place":
            self.calls += 1
        if self.how == "anew":
            self.calls = self.calls + 1
        if self.how == "statistics":
            self.norm.running_mean.lerp_(y.mean((0, 2, 3)), 0.5)
        return self.norm(y) * (1 + self.calls)


@pytest.mark.parametrize("how", ["in place", "anew", "statistics"])
def test_what_a_network_changes_in_itself_begins_where_the_model_is(how):
    fast = same(Counting(how), images(2) + 3, calls=3)
    assert "changes" in fast.plan.left["the network"]
    assert "not recorded" in fast.plan.left["CUDA graph"]


class Outer(nn.Module):
    """Cannot be captured whole."""

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
        return self.conv(x) * self.scale


def louder(net, y, x):
    net.inner.scale = 3.0
    y = y + net.inner(x)
    net.inner.scale = 1.0
    return y


def of_a_kind(net, y, x):
    assert isinstance(net.pair, nn.Sequential)
    return y


def test_a_part_that_code_sets_up_otherwise_runs_as_it_was():
    fast = same(Outer(louder), images(2))
    assert "gives something else" in fast.plan.left["inner"]
    assert "pair" not in fast.plan.left


def test_code_may_count_what_it_calls_and_ask_for_its_kind():
    assert "pair" not in same(Outer(lambda net, y, x: y * len(net.pair)), images(2)).plan.left
    assert "does not run around its graph" in same(Outer(of_a_kind), images(2)).plan.left["pair"]


def test_a_part_that_changes_its_own_buffers_runs_as_it_was():
    model = Outer(lambda net, y, x: y)
    model.inner = Counting("in place")
    fast = same(model, images(2), calls=3)
    assert "changes its own buffers" in fast.plan.left["inner"]
    assert "pair" not in fast.plan.left
