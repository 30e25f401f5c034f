import pytest
import torch
from torch import nn

import halve
from halve.errors import MaskError, OptionError
from halve.learn import norms
from halve.learn.norms import Norms
from tests.random_masks import random
from tests.tiny import convnet, images, interrupting, learn
from tests.untouched import same_bits, untouched


def test_scale_and_shift_are_learned_and_the_model_stays_as_it_is():
    model = convnet()
    with untouched(model):
        masks = learn(model, images(), steps=20, norms="learn")
    assert list(masks.corrections) == ["1.weight", "1.bias", "4.weight", "4.bias"]
    for name, (before, after) in masks.corrections.items():
        assert same_bits(before, model.state_dict()[name])
        assert not torch.equal(before, after)
    found = halve.verify(halve.apply(model, masks), masks)
    assert found.ok
    assert masks.recipe["norms"] == "learn"


def test_by_default_norms_are_frozen():
    masks = learn(convnet(), images(), steps=2)
    assert not masks.corrections
    assert masks.recipe["norms"] == "frozen"


@torch.no_grad()
def test_learned_norms_bring_the_same_masks_closer_to_the_dense_network():
    model, x = convnet(), images(64)
    options = {"steps": 100, "alpha": 1e4, "augment": False, "match": "outputs"}  # so sharp that no mask changes
    frozen, learned = (learn(model, x, norms=use, **options) for use in ("frozen", "learn"))
    assert frozen.difference(learned) == 0
    errors = [float((halve.apply(model, masks)(x) - model(x)).norm()) for masks in (frozen, learned)]
    assert errors[1] < 0.8 * errors[0]


def test_what_is_judged_is_what_apply_returns():
    model, x = convnet(), images(256)
    masks = halve.learn(model, x, steps=30, norms="learn", permute=False, fallback=False)
    held_back = halve.evaluate(model, masks, x[-masks.recipe["quality"]["images"] :])
    assert held_back.kl == pytest.approx(masks.recipe["quality"]["kl"], rel=1e-3, abs=1e-6)  # rounded


def test_one_shot_masks_that_are_returned_instead_have_no_corrections(monkeypatch):
    monkeypatch.setattr(norms, "RATE", 5.0)  # ruins the network
    with pytest.warns(match="returning the one-shot masks"):
        masks = halve.learn(convnet(), images(256), steps=20, norms="learn", permute=False)
    assert not masks.corrections


@pytest.mark.filterwarnings("ignore:interrupted")
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    model, path, options = convnet(), tmp_path / "run", {"steps": 8, "norms": "learn"}
    whole = learn(model, [images(6)], **options)
    learn(model, [images(6)], run_state=path, report=interrupting(3), **options)
    assert learn(model, [images(6)], run_state=path, resume=True, **options) == whole


def test_learning_continues_from_corrections_and_keeps_them_if_norms_are_frozen():
    model = convnet()
    first = learn(model, images(), steps=20, norms="learn")
    kept = learn(model, images(), steps=2, start=first)
    assert kept.corrections.keys() == first.corrections.keys()
    assert all(same_bits(kept.corrections[name], first.corrections[name]) for name in first.corrections)
    on = learn(model, images(), steps=2, start=first, norms="learn")
    for name, (before, after) in on.corrections.items():
        near, far = ((after - value).norm() for value in (first.corrections[name][1], before))
        assert near < far


class Normed(nn.Module):
    """Norms of several kinds, one of which does not run."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.layer, self.group = nn.LayerNorm(16), nn.GroupNorm(4, 16)
        self.plain, self.idle = nn.BatchNorm1d(16, affine=False), nn.BatchNorm1d(16)

    def forward(self, x):
        return self.head(self.plain(self.group(self.second(self.layer(self.first(x)).relu()))).relu())


@pytest.mark.parametrize("name", ["8.weight", "20.weight"])
def test_corrections_of_other_tensors_are_no_start(name):
    model = convnet()
    start = halve.prune(model).with_corrections({name: torch.ones(2, 16, 32)})
    with pytest.raises(MaskError, match=f"another model: {name} is no scale or shift of a norm"):
        learn(model, images(), start=start, steps=1)


def test_layer_and_group_norms_learn_too_and_norms_that_do_not_run_stay():
    model = Normed().eval()
    masks = learn(model, random(32, 8), steps=10, norms="learn")
    assert {name.split(".")[0] for name in masks.corrections} == {"layer", "group"}
    assert halve.verify(halve.apply(model, masks), masks).ok


def test_a_model_without_norms_has_nothing_to_correct():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    assert Norms(model, {}, learned=True).size == 0
    assert not learn(model, random(16, 8), steps=2, norms="learn").corrections


def test_corrections_count_in_an_accuracy_budget():
    model, x = convnet(), images(256)
    masks = halve.learn(model, x, steps=20, norms="learn", permute=False, fallback=False, max_drop=0.5)
    assert masks.corrections
    held_back = x[-masks.recipe["quality"]["images"] :]
    assert 1 - halve.evaluate(model, masks, held_back).agreement == pytest.approx(masks.recipe["drop"])


def test_an_unknown_use_of_norms_is_refused():
    with pytest.raises(OptionError, match="norms must be one of"):
        learn(convnet(), images(), steps=1, norms="melt")
