"""Whether a weight that is zero multiplies nothing, or the layer makes something else of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halve.modules import zeros_stay_zero
from tests.masks.computed import wrapped
from tests.untouched import untouched


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Standardised(nn.Conv2d):
    """Weight standardisation, as in BiT and in timm's StdConv2d."""

    def forward(self, x):
        mean, deviation = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (deviation + 1e-5), self.bias)


class StandardisedInside(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class SamePadded(nn.Conv2d):
    """Padding as in TensorFlow, as in timm's Conv2dSame."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 3


class Renamed(nn.Conv2d):
    pass


class Shifted(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight + 0.1, self.bias)


class Halved(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / 2, self.bias)


class ShiftedTransposed(nn.ConvTranspose2d):
    def forward(self, x):
        return F.conv_transpose2d(x, self.weight + 0.1, self.bias)


class PlainTransposed(nn.ConvTranspose2d):
    def forward(self, x):
        return F.conv_transpose2d(x, self.weight, self.bias)


class TakesTwo(nn.Conv2d):
    def forward(self, x, y):
        return super().forward(x + y)


class TakesAnObject(nn.Conv2d):
    def forward(self, sample):
        return super().forward(sample.image)


class TakesADict(nn.Conv2d):
    def forward(self, sample):
        return super().forward(sample["image"])


class Asserts(nn.Linear):
    def forward(self, x):
        assert x.dim() == 7
        return super().forward(x)


ZEROS = [
    (nn.Linear(8, 4), True),
    (nn.Conv2d(8, 4, 3), True),
    (nn.Conv3d(8, 4, 3, groups=2, dilation=2), True),
    (nn.ConvTranspose1d(8, 4, 3), True),
    (Renamed(8, 4, 3), True),
    (SamePadded(8, 4, 3), True),
    (SamePadded(8, 4, (1, 5), dilation=3), True),
    (SamePadded(8, 8, 3, groups=8), True),
    (SamePadded(8, 4, 3).half(), True),
    (SamePadded(8, 4, 3).train(), True),
    (Scaled(8, 4, 3), True),
    (Halved(8, 4), True),
    (PlainTransposed(8, 4, 3), True),
    (Standardised(8, 4, 3), False),
    (Standardised(8, 4, 3, dilation=2, groups=2), False),
    (Standardised(8, 4, 1).bfloat16(), False),
    (StandardisedInside(8, 4, 3), False),
    (Shifted(8, 4), False),
    (ShiftedTransposed(8, 4, 3), False),
    (TakesTwo(8, 4, 3), False),
    (TakesAnObject(8, 4, 3), False),
    (TakesADict(8, 4, 3), False),
    (Asserts(8, 4), False),
]


@pytest.mark.parametrize(("layer", "stay"), ZEROS, ids=[f"{type(layer).__name__}-{stay}" for layer, stay in ZEROS])
def test_whether_zeros_in_a_weight_stay_zero(layer, stay):
    with untouched(layer):
        assert zeros_stay_zero(layer) is stay


@wrapped
def test_zeros_stay_zero_in_a_harmless_subclass_whatever_computes_its_weight(wrap):
    layer = wrap(SamePadded(8, 4, 3))
    with untouched(layer):
        assert zeros_stay_zero(layer) is True


@wrapped
def test_zeros_do_not_stay_zero_under_standardisation_whatever_computes_the_weight(wrap):
    layer = wrap(Standardised(8, 4, 3))
    with untouched(layer):
        assert zeros_stay_zero(layer) is False


def test_asking_whether_zeros_stay_leaves_random_numbers_alone():
    layer = SamePadded(8, 4, 3)
    before = torch.get_rng_state()
    zeros_stay_zero(layer)
    assert torch.equal(torch.get_rng_state(), before)
