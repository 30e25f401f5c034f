import json

import pytest
import torch
from torch import nn

import halve
from halve.errors import DataError, LearningError, ModelError, OptionError
from halve.learn.accuracy_budget import enforce_accuracy_budget
from tests.random_masks import random
from tests.tiny import convnet, images, labels, learn
from tests.untouched import untouched


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(16, 6)).eval()
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight *= 1.6
    return model


def drop_of(model, masks, x):
    return 1 - halve.evaluate(model, masks, [x]).agreement


@pytest.mark.parametrize("max_drop", [0.02, 0.05, 0.15, 1.0])
def test_the_budget_is_met_on_the_data(max_drop):
    model, x = network(), random(300, 16)
    masks = halve.prune(model)
    with untouched(model):
        kept = enforce_accuracy_budget(model, masks, [x[:100], x[100:]], max_drop)
    assert 0 < len(kept) <= len(masks)
    assert drop_of(model, kept, x) == pytest.approx(kept.recipe["drop"])
    assert kept.recipe["drop"] <= max_drop
    assert kept.recipe["drop_before"] == pytest.approx(drop_of(model, masks, x))
    assert all(kept[name] == masks[name] for name in kept)


def test_the_costliest_layers_are_left_dense_and_the_recipe_says_so():
    model, x = network(), random(300, 16)
    masks = halve.prune(model)
    kept = enforce_accuracy_budget(model, masks, x, 0.05)
    dense = kept.recipe["left_dense"]
    assert dense.keys() | kept.keys() == masks.keys()
    assert not dense.keys() & kept.keys()
    assert len(dense) == 2
    assert list(dense.values()) == sorted(dense.values(), reverse=True)
    costs = {}
    for name in masks:
        alone = halve.MaskSet({name: masks[name]})
        costs[name] = halve.evaluate(model, alone, [x]).kl
    assert dense == pytest.approx({name: costs[name] for name in dense}, rel=1e-3)
    assert min(dense.values()) >= max(costs[name] for name in kept) - 1e-6
    assert json.loads(json.dumps(kept.recipe)) == kept.recipe


def test_a_budget_that_is_met_by_all_masks_leaves_them_all():
    model = network()
    masks = halve.prune(model)
    kept = enforce_accuracy_budget(model, masks, random(50, 16), 1.0)
    assert kept == masks
    assert kept.recipe["left_dense"] == {}


def test_when_no_layer_can_be_masked_the_error_says_by_how_much_they_drop():
    model = network()
    with pytest.raises(ModelError, match=r"no layer can be masked within max_drop=0.0: .* drop is 0\.\d+"):
        enforce_accuracy_budget(model, halve.prune(model, "random", pattern="1:4"), random(300, 16), 0.0)


def test_top1_counts_right_answers_and_needs_labels():
    model, x = network(), random(200, 16)
    truth = model(x).argmax(1)
    masks = halve.prune(model)
    by_labels = enforce_accuracy_budget(model, masks, [(x, truth)], 0.05, "top1")
    by_agreement = enforce_accuracy_budget(model, masks, x, 0.05)
    assert by_labels == by_agreement
    assert by_labels.recipe["drop"] == by_agreement.recipe["drop"]
    assert by_labels.recipe["drop_metric"] == "top1"
    with pytest.raises(DataError, match=r"'top1' needs labels in drop_data"):
        enforce_accuracy_budget(model, masks, x, 0.3, "top1")


@pytest.mark.parametrize("bad", [{"max_drop": 2}, {"max_drop": -0.1}, {"max_drop": 0.1, "metric": "top5"}])
def test_bad_budgets_are_refused(bad):
    model = network()
    with pytest.raises(OptionError, match=r"max_drop must be between 0 and 1|drop_metric must be one of"):
        enforce_accuracy_budget(model, halve.prune(model), random(5, 16), **bad)


def test_outputs_that_are_no_class_scores_are_refused():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    with pytest.raises(ModelError, match=r"outputs of shape \(images, classes\), got \(2, 4, 8, 8\)"):
        enforce_accuracy_budget(model, halve.prune(model), images(2), 0.1)


def test_statistics_stay_with_the_masks():
    model = convnet()
    masks = halve.prune(model, recalibrate=True, data=images())
    assert enforce_accuracy_budget(model, masks, images(), 1.0).statistics.keys() == masks.statistics.keys()


def test_learn_keeps_within_the_budget():
    model, x = network(), random(200, 16)
    masks = learn(model, x, steps=5, max_drop=0.4, drop_data=[x])
    assert masks.recipe["method"] == "learn"
    assert masks.recipe["drop"] <= 0.4
    assert drop_of(model, masks, x) <= 0.4
    assert halve.verify(halve.apply(model, masks), masks).ok


def test_learn_takes_the_budget_and_its_data_together_or_not_at_all():
    for half in ({"max_drop": 0.1}, {"drop_data": images()}):
        with pytest.raises(OptionError, match="must be given together"):
            learn(convnet(), images(), steps=1, **half)
    with pytest.raises(LearningError, match="top1") as raised:
        learn(convnet(), images(), steps=1, max_drop=0.1, drop_data=images(), drop_metric="top1")
    assert halve.verify(halve.apply(convnet(), raised.value.masks), raised.value.masks).ok
    learn(convnet(), images(), steps=1, max_drop=1.0, drop_data=[(images(), labels())], drop_metric="top1")


@pytest.mark.parametrize("bad", [{"max_drop": 2.0}, {"max_drop": 0.1, "drop_metric": "top5"}])
def test_a_bad_budget_is_refused_before_anything_is_learned(bad):
    seen = []
    with pytest.raises(OptionError):
        learn(convnet(), images(), steps=2, drop_data=images(), report=seen.append, **bad)
    assert seen == []
