import pytest
import torch
from torch import nn

import halve
from halve import machine
from halve.errors import DataError
from halve.learn.form import Form, form_of
from halve.learn.frozen import frozen
from tests.tiny import convnet, images


class Viewing(nn.Module):
    """Flattens by `view`, which fails in channels last."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8 * 16, 5)

    def forward(self, x):
        return self.head(self.two(self.one(x).relu()).relu().view(len(x), -1))


class Writing(nn.Module):
    """Writes what a convolution returns into float32 values, which fails in bfloat16."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        z = torch.zeros(len(x), 8)
        z[torch.arange(len(x))] = self.two(self.one(x).relu()).mean((2, 3))
        return z


@pytest.fixture
def fast_bfloat16(monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512_bf16"}))


@pytest.mark.parametrize(
    ("model", "precision", "form"),
    [
        (convnet, "auto", Form(half=True)),
        (convnet, "float32", Form(half=False)),
        (Viewing, "auto", Form(half=True, channels_last=False)),
        (Viewing, "float32", Form(half=False, channels_last=False)),
        (Writing, "auto", Form(half=False)),
    ],
)
def test_the_fastest_form_in_which_the_model_runs(fast_bfloat16, model, precision, form):
    copy = frozen(model().eval(), [])
    assert form_of(copy, images(2), None, precision) == form
    format_ = torch.channels_last if form.channels_last else torch.contiguous_format
    assert all(p.is_contiguous(memory_format=format_) for p in copy.parameters() if p.dim() == 4)


def test_a_precision_that_was_asked_for_is_kept(fast_bfloat16):
    with pytest.raises(DataError, match="Writing failed on images"):
        halve.learn(Writing().eval(), images(64), steps=1, precision="bfloat16", progress=False)


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("model", [Viewing, Writing])
def test_models_that_do_not_run_in_every_form_learn(fast_bfloat16, model, permute):
    torch.manual_seed(0)
    model, x = model().eval(), images(64)
    masks = halve.learn(model, x, steps=2, permute=permute, fallback=False, progress=False)
    assert masks.recipe["quality"]["images"] == 8
    halve.apply(model, masks)(x[:2])


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(8, 16, 1), (8, 8)),
        (nn.Conv1d(8, 16, 3, padding=1), (8, 8)),
        (nn.Conv2d(8, 16, 1), (8, 4, 4)),
        (nn.Conv2d(8, 16, 3, padding=1), (8, 4, 4)),
        (nn.Conv3d(8, 16, 1), (8, 2, 2, 2)),
        (nn.Conv3d(8, 16, 3, padding=1), (8, 2, 2, 2)),
    ],
    ids=str,
)
def test_views_of_what_masked_convolutions_return(conv, shape):
    torch.manual_seed(0)
    x = torch.randn(64, *shape)
    features = conv(x[:1]).numel()
    model = nn.Sequential(conv, nn.ReLU(), Flat(), nn.Linear(features, 4)).eval()
    masks = halve.learn(model, x, steps=2, also="0", exclude="3", permute=False, fallback=False, progress=False)
    assert list(masks) == ["0"]


class Flat(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


class Custom(Exception):
    """What the code of a model may raise."""


def test_whatever_a_model_raises_the_next_form_is_tried(fast_bfloat16):
    def forward(model, batch):
        if torch.is_autocast_enabled("cpu"):
            raise Custom
        return model(batch)

    copy = frozen(convnet().eval(), [])
    assert form_of(copy, images(2), forward, "auto") == Form(half=False)


def test_weights_with_masks_keep_the_memory_format():
    weight = torch.randn(8, 8, 3, 3)
    [mask] = halve.prune(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2)).eval()).values()
    assert mask.apply_to(weight).is_contiguous()
    last = weight.contiguous(memory_format=torch.channels_last)
    assert mask.apply_to(last).stride() == last.stride()
    assert torch.equal(mask.apply_to(last), mask.apply_to(weight))
    assert mask.apply_to(weight.to(torch.float8_e4m3fn)).dtype == torch.float8_e4m3fn
