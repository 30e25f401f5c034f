"""Networks with state that they change when they run."""

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


def test_views_of_channels_last_images():
    same(Net(lambda n, x: n.b(n.a(x)).view(x.size(0), -1)), images(2))
    last = images(2).contiguous(memory_format=torch.channels_last)
    fast = compiled(Net(lambda n, x: n.b(n.a(x)).view(x.size(0), -1)).eval(), halve.MaskSet({}), last)
    torch.testing.assert_close(fast(last), fast(images(2)))
    fast = same(Net(lambda n, x: n.a(x).as_strided((2, 4), (256, 1))), images(2))
    assert "as_strided" in fast.plan.uncompiled["the network"]


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
def test_state_starts_from_that_of_the_model(how):
    fast = same(Counting(how), images(2) + 3, calls=3)
    assert "changes" in fast.plan.uncompiled["the network"]
    assert "not recorded" in fast.plan.uncompiled["CUDA graph"]
