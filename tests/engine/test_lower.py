import torch
import torch.nn.functional as F
from torch import nn

import halve
from tests.engine.nets import compiled, same
from tests.tiny import images


def test_submodule_names_of_the_model_are_not_reused():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer0 = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv1d(1, 1, 3, padding=1))
            self._layer0 = nn.Conv2d(8, 4, 1)

        def forward(self, x):
            x = self.layer0[0](x)
            attention = self.layer0[1](x.mean((2, 3))[:, None])[:, 0, :, None, None]  # which is not replaced
            return self._layer0(x * attention.sigmoid())

    model = Named().eval()
    fast = compiled(model, halve.MaskSet({}))
    torch.testing.assert_close(fast(images(2)), model(images(2)))


def test_a_layer_whose_bias_is_computed_is_not_replaced():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bias = nn.Conv2d(4, 4, 3), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return F.conv2d(self.conv(x), self.conv.weight, self.bias * 2).relu()

    fast = same(Scaled(), images(2))
    assert len(fast.layers) == 1
