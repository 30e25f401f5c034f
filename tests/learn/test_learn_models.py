"""Models of every kind learn: other precisions, dicts of outputs, computed and tied weights, 1 to 3 dimensions."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import halve
from tests.tiny import convnet, learn, loader
from tests.untouched import untouched


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_precisions_learn(dtype):
    model = convnet().to(dtype)
    with untouched(model):
        masks = learn(model, loader(), steps=3)
    assert halve.verify(halve.apply(model, masks), masks).ok
    assert halve.apply(model, masks)[0].weight.dtype == dtype


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, a, b):
        return {"aux": self.head(self.body(b)), "logits": self.head(self.body(a))}


def test_a_forward_of_ones_own_runs_submodules_with_masked_weights():
    model = TwoHeads().eval()
    data = [{"a": torch.randn(6, 8, generator=torch.Generator().manual_seed(1))}]
    changed = []

    def forward(m, batch):
        hidden = m.body(batch["a"])
        changed.append(bool((m.body[0].weight == 0).any()))
        return m.head(hidden)

    seen = []
    masks = learn(model, data, steps=30, forward=forward, start="glorot", report=seen.append)
    assert changed[:4] == [False, False, False, True]  # two calls look at which layers run, and how they can be run
    assert changed.count(True) == changed.count(False) - 2 == 31
    assert seen[-1].changed > 0
    assert seen[-1].loss < seen[1].loss
    assert list(masks) == ["body.0", "body.2"]


def test_layers_that_the_data_never_runs_are_not_masked_and_are_listed():
    model = TwoHeads().eval()
    data = [{"a": torch.randn(6, 8)}]
    masks = learn(model, iter(data * 3), steps=3, forward=lambda m, batch: m.body[:2](batch["a"]))
    assert list(masks) == ["body.0"]
    assert masks.recipe["not_masked"]["body.2"] == "did not run on the data (also='body.2' masks it)"
    assert masks.recipe["steps_done"] == 3  # the batch that was looked at is learned from too
    named = learn(model, data, steps=3, forward=lambda m, batch: m.body[:2](batch["a"]), also="body.2")
    assert torch.equal(named["body.2"].kept(), halve.prune(model)["body.2"].kept())


def test_dicts_of_outputs_are_understood():
    def forward(m, batch):
        return m(**batch)

    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    masks = learn(TwoHeads().eval(), [{"a": x, "b": x}], steps=2, forward=forward, match="outputs")
    assert masks.recipe["steps_done"] == 2


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_layers_with_a_computed_weight_learn(norm):
    model = convnet()
    norm(model[3])
    model.eval()
    with untouched(model):
        masks = learn(model, loader(), steps=12, start="random", lr=0.5)
    assert "3" in masks
    assert masks["3"].difference(halve.prune(model, "random")["3"]) > 0
    assert halve.verify(halve.apply(model, masks), masks).ok


def test_tied_weights_learn_one_mask_for_all_their_uses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    model[2].weight = model[0].weight
    data = torch.randn(20, 8)
    with untouched(model):
        masks = learn(model, data, steps=3)
    assert list(masks) == ["0"]
    assert masks["0"].shared_with == ("2",)
    assert halve.verify(halve.apply(model, masks), masks).ok


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3)], (3, 4, 9)),
        ([nn.Conv3d(4, 8, 2), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 2)], (3, 4, 4, 4, 4)),
        ([nn.ConvTranspose2d(4, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 3)], (3, 4, 4, 4)),
    ],
    ids=["1d", "3d", "transposed"],
)
def test_convolutions_of_every_kind_learn(layers, shape):
    model = nn.Sequential(*layers, nn.Flatten(2), nn.ReLU()).eval()
    masks = learn(model, [torch.randn(shape)], steps=2, also=[str(len(layers) - 1)])
    assert list(masks) == ["0", str(len(layers) - 1)]
    assert halve.verify(halve.apply(model, masks), masks).ok


def test_padded_layers_stay_legal_under_strong_weight_decay():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3)).eval()
    data = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))]
    options = {"remainder": "pad", "schedule": "constant", "lr": 1.0, "weight_decay": 0.2, "final": "sample"}
    masks = learn(model, data, steps=60, **options)
    assert masks["0"].kept().sum(1).eq(2).all()


def test_a_copy_of_the_model_learns_the_same():
    model = convnet()
    assert learn(model, loader(), steps=3) == learn(copy.deepcopy(model), loader(), steps=3)
