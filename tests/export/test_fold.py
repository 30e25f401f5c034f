import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from halve.export.fold import add_biases_, fold_, thaw_
from halve.graph import capture


def lively(model):
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm | FrozenBatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.1, 9)
            if norm.weight is not None:
                nn.init.uniform_(norm.weight, -2, 2)
                nn.init.normal_(norm.bias)
    return model.eval()


class Shared(nn.Module):
    """One convolution with two norms: neither can be folded."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.one, self.two = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.two(self.conv(self.one(self.conv(x))))


class Tapped(nn.Module):
    """The value before the norm is used as well."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


IMAGE, ROWS = (2, 4, 8, 8), (2, 4)
CASES = {
    "conv": (nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), IMAGE, ["1"]),
    "conv with bias": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), IMAGE, ["1"]),
    "grouped": (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)), IMAGE, ["1"]),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)), IMAGE, ["1"]),
    "conv1d": (nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (2, 4, 8), ["1"]),
    "linear": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), ROWS, ["1"]),
    "tokens": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5)), (2, 5, 4), []),
    "frozen": (nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), FrozenBatchNorm2d(6)), IMAGE, ["1"]),
    "before": (nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3)), IMAGE, []),
    "shared": (Shared(), IMAGE, []),
    "tapped": (Tapped(), IMAGE, []),
}


@pytest.mark.parametrize("case", CASES)
def test_norms_fold_where_only_they_read_the_layer_and_the_model_computes_the_same(case):
    model, shape, wanted = CASES[case]
    model, x = lively(model), torch.randn(shape)
    with torch.no_grad():
        expected = model(x)
        thaw_(model)
        add_biases_(model)
        assert fold_(model, capture(model, x).parts[0]) == wanted
        torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
    assert all(bool((norm.running_var == 1).all()) for norm in model.modules() if hasattr(norm, "running_var"))


def test_folded_norms_run_in_every_version_of_pytorch():
    """Some versions refuse an epsilon of zero."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()
    folded = fold_(model, capture(model, torch.randn(IMAGE)).parts[0])
    assert folded == ["1"]
    assert model[1].eps > 0
    x = torch.randn(IMAGE)
    assert torch.equal(model(x), model[0](x))
