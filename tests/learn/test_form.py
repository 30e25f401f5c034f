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


def test_applied_masks_keep_the_memory_format():
    model = Viewing().eval()
    assert halve.apply(model, halve.prune(model)).two.weight.is_contiguous()
    model = model.to(memory_format=torch.channels_last)
    two = halve.apply(model, halve.prune(model)).two.weight
    assert two.is_contiguous(memory_format=torch.channels_last)
