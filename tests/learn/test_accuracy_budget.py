import json
import re
import warnings

import pytest
from torch import nn

import halve
from halve.errors import DataError, LearningWarning, ModelError, OptionError
from halve.learn.accuracy_budget import Trade, by_worth, costs_of, enforce_accuracy_budget, enforce_speed_target
from halve.machine import device_names
from halve.select.speed_plan import LayerSpeed, SpeedPlan
from tests.random_masks import random
from tests.tiny import convnet, costly, images, learn
from tests.untouched import untouched


def drop_of(model, masks, x):
    return 1 - halve.evaluate(model, masks, [x]).agreement


@pytest.mark.parametrize("max_drop", [0.02, 0.05, 0.15, 1.0])
def test_the_budget_is_met_on_the_data(max_drop):
    model, x = costly(), random(300, 16)
    masks = halve.prune(model)
    with untouched(model):
        kept = enforce_accuracy_budget(model, masks, [x[:100], x[100:]], max_drop)
    assert 0 < len(kept) <= len(masks)
    assert drop_of(model, kept, x) == pytest.approx(kept.recipe["drop"])
    assert kept.recipe["drop"] <= max_drop
    assert kept.recipe["drop_before"] == pytest.approx(drop_of(model, masks, x))
    assert all(kept[name] == masks[name] for name in kept)


def test_the_costliest_layers_are_left_dense_and_the_recipe_says_so():
    model, x = costly(), random(300, 16)
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
    model = costly()
    masks = halve.prune(model)
    kept = enforce_accuracy_budget(model, masks, random(50, 16), 1.0)
    assert kept == masks
    assert kept.recipe["left_dense"] == {}


def test_when_no_layer_can_be_masked_the_error_says_by_how_much_they_drop():
    model = costly()
    with pytest.raises(ModelError, match=r"no layer can be masked within max_drop=0.0: .* drop is 0\.\d+"):
        enforce_accuracy_budget(model, halve.prune(model, "random", pattern="1:4"), random(300, 16), 0.0)


def test_top1_counts_right_answers_and_needs_labels():
    model, x = costly(), random(200, 16)
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
    model = costly()
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
    model, x = costly(), random(200, 16)
    masks = learn(model, x, steps=5, max_drop=0.4, drop_data=[x])
    assert masks.recipe["method"] == "learn"
    assert masks.recipe["drop"] <= 0.4
    assert drop_of(model, masks, x) <= 0.4
    assert halve.verify(halve.apply(model, masks), masks).ok


def test_the_drop_is_measured_on_images_that_are_held_back_or_given():
    with pytest.raises(OptionError, match="drop_data= needs max_drop="):
        learn(convnet(), images(), steps=1, drop_data=images())
    with pytest.raises(DataError, match="max_drop= needs images to measure the drop on: validation=False"):
        learn(convnet(), images(), steps=1, max_drop=0.1)
    model, x = convnet(), images(160)
    masks = learn(model, [x], steps=1, max_drop=1.0, validation=None, fallback=False)
    assert masks.recipe["drop"] == pytest.approx(drop_of(model, masks, x[-8:]))


def plan_of(masks, saved, dense_ms=10.0, sparse_ms=5.0):
    """A plan in which masks save these milliseconds."""
    layers = {
        name: LayerSpeed(mask.layout.shape, "", 1.0, 1.0 - ms)
        for (name, mask), ms in zip(masks.items(), saved, strict=True)
    }
    return SpeedPlan(layers, device_names()[-1], "float32", 1, (16,), dense_ms, dense_ms, sparse_ms)


def test_layers_that_save_the_fewest_milliseconds_for_their_cost_are_left_dense_first():
    model, x = costly(), random(300, 16)
    masks = halve.prune(model)
    plain = enforce_accuracy_budget(model, masks, x, 0.1)
    plan = plan_of(masks, [0.9 if name in plain.recipe["left_dense"] else 1e-6 for name in masks])
    kept = enforce_accuracy_budget(model, masks, x, 0.1, plan=plan)
    assert kept.recipe["drop"] <= 0.1
    assert plan.ms(kept) < plan.ms(plain)
    costs = dict.fromkeys(masks, 1.0)
    assert by_worth(costs, plan_of(masks, [0.4, 0.1, 0.3, 0.2])) == [list(masks)[i] for i in (1, 3, 2, 0)]


def test_a_speed_target_keeps_the_masks_that_save_most_for_their_cost():
    model, x = costly(), random(300, 16)
    masks = halve.prune(model)
    plan = plan_of(masks, [0.5, 0.5, 0.5, 0.5])  # all of them: 2 x
    kept = enforce_speed_target(model, masks, x, 1.4, plan)
    assert plan.speedup(kept) >= 1.4
    assert len(kept) == 3  # two of them: 10 / 7.5 = 1.33 x
    dense = list(kept.recipe["left_dense"])
    assert dense == [max(masks, key=lambda name: halve.evaluate(model, halve.MaskSet({name: masks[name]}), [x]).kl)]
    assert kept.recipe["drop"] == pytest.approx(drop_of(model, kept, x))
    assert enforce_speed_target(model, masks, x, 2.0, plan) == masks
    with pytest.raises(ModelError, match=r"min_speedup=2.5 is out of reach: all 4 masks together give 2.00 x"):
        enforce_speed_target(model, masks, x, 2.5, plan)


def test_a_layer_that_saves_too_much_to_be_left_dense_does_not_keep_others_from_it():
    model, x = costly(), random(300, 16)
    masks = halve.prune(model)
    costs = costs_of(model, masks, x)
    worst = max(costs, key=costs.__getitem__)
    plan = plan_of(masks, [1.0 if name == worst else 2 * cost / costs[worst] for name, cost in costs.items()])
    assert by_worth(costs, plan)[0] == worst
    others = [name for name in masks if name != worst]
    target = max(plan.speedup([worst, *others[1:]]), plan.speedup([worst, *others[:-1]]))
    assert plan.speedup(others) < target < plan.speedup(masks)
    kept = enforce_speed_target(model, masks, x, target, plan)
    assert worst in kept
    assert len(kept) < len(masks)
    assert plan.speedup(kept) >= target


def test_learn_reaches_a_speed_target_and_learns_the_other_layers_again():
    model, x = costly(), random(400, 16)
    plan = plan_of(halve.prune(model), [0.5, 0.5, 0.5, 0.5])
    with untouched(model):
        masks = halve.learn(model, x, steps=40, plan=plan, min_speedup=1.4, permute=False, progress=False)
    assert len(masks) == 3
    recipe = masks.recipe
    assert recipe["min_speedup"] == 1.4
    assert recipe["drop"] == pytest.approx(drop_of(model, masks, x[-20:]))
    first = halve.learn(model, x, steps=40, plan=plan, permute=False, progress=False)
    assert recipe.get("relearned") == 10 or all(masks[name] == first[name] for name in masks)
    assert json.loads(json.dumps(recipe)) == recipe
    assert halve.verify(halve.apply(model, masks), masks).ok


def test_the_recipe_estimates_the_speed_of_masks_with_a_plan_and_what_others_would_save():
    model, x = costly(), random(400, 16)
    plan = plan_of(halve.prune(model), [0.5, 0.5, 0.5, 0.5])
    options = {"steps": 2, "plan": plan, "permute": False, "progress": False, "fallback": False}
    masks = halve.learn(model, x, min_speedup=1.4, **options)
    expected = {"ms": plan.ms(masks), "speedup": 1.6, "dense_ms": 10.0, "device": plan.device}
    assert masks.recipe["estimated"] == expected | {"dtype": "float32", "batch": 1}
    assert masks.recipe["left_dense_ms"] == dict.fromkeys(masks.recipe["left_dense"], 1.25)
    recipe = halve.learn(model, x, **options).recipe
    assert (recipe["estimated"]["ms"], recipe["estimated"]["speedup"]) == (5.0, 2.0)
    assert "left_dense_ms" not in recipe
    again = halve.learn(model, x, steps=2, permute=False, progress=False, fallback=False, start=masks).recipe
    assert "estimated" not in again  # for which machine would that be?


@pytest.mark.parametrize("options", [{}, {"min_speedup": 1.5}, {"max_drop": 0.5}])
def test_a_plan_that_is_none_is_refused(options):
    with pytest.raises(OptionError, match=r"plan must be what halve.measure returned, or the file .*; got dict"):
        halve.learn(costly(), random(400, 16), plan={"layers": {}}, steps=1, **options)


def test_a_speed_that_no_masks_reach_is_refused_before_anything_is_learned():
    model, seen = costly(), []
    plan = plan_of(halve.prune(model), [0.5, 0.5, 0.5, 0.5])
    with pytest.raises(OptionError, match=r"min_speedup=9 is out of reach: masks in all 4 layers give \d\.\d\d x on"):
        halve.learn(model, random(400, 16), steps=2, plan=plan, min_speedup=9, report=seen.append)
    assert seen == []


def test_learning_again_keeps_what_is_better():
    model, x = costly(), random(400, 16)
    masks = halve.learn(model, x, steps=40, max_drop=0.05, permute=False, progress=False, fallback=False)
    assert masks.recipe["left_dense"]
    assert masks.recipe["relearned"] == 10  # deterministic: it is better here
    assert masks.recipe["drop"] <= 0.05
    assert masks.recipe["quality"]["agreement"] == pytest.approx(1 - drop_of(model, masks, x[-20:]))


def test_the_recipe_tells_the_quality_of_masks_that_were_learned_again():
    model, x = costly(), random(2000, 16)
    poor = {"start": "random", "lr": 1e-6, "steps": 4, "seed": 1}  # one-shot masks are better
    with pytest.warns(LearningWarning, match="worse than one-shot masks"):
        masks = halve.learn(model, x, max_drop=0.1, permute=False, progress=False, **poor)
    quality = masks.recipe["quality"]
    assert masks.recipe["left_dense"]
    assert masks.recipe["relearned"] == 1
    assert quality["returned"] == "learned"
    assert (quality["learned"], quality["one_shot"]) == (None, None)  # of masks in all layers
    seen = halve.evaluate(model, masks, [x[-100:][: quality["images"]]])
    assert (quality["agreement"], quality["kl"]) == pytest.approx((seen.agreement, seen.kl), abs=1e-5)


def test_an_iterator_cannot_be_learned_from_again_and_this_is_said():
    model, x = costly(), random(400, 16)
    options = {"steps": 4, "max_drop": 0.05, "drop_data": iter([x[:200]]), "permute": False, "fallback": False}
    with pytest.warns(LearningWarning, match=r"not learned again: the data is an iterator, .* pass a DataLoader"):
        masks = halve.learn(model, iter(x.split(40)), **options)
    assert masks.recipe["left_dense"]
    assert masks.recipe["not_relearned"].startswith("the data is an iterator")
    assert "relearned" not in masks.recipe


def test_masks_that_were_worse_after_learning_again_are_not_returned(monkeypatch):
    model, x = costly(), random(400, 16)
    monkeypatch.setattr(Trade, "drop", lambda *_: 0.5)
    options = {"steps": 4, "max_drop": 0.05, "drop_data": iter([x]), "permute": False, "progress": False}
    masks = halve.learn(model, x, **options, fallback=False)
    assert masks.recipe["drop"] == pytest.approx(drop_of(model, masks, x))
    assert masks.recipe["left_dense"]
    assert re.match(r"the drop was 50.00 % afterwards, and \d\.\d\d % before", masks.recipe["not_relearned"])


def test_an_error_while_learning_again_keeps_the_masks():
    model, x = costly(), random(400, 16)
    steps = []

    def report(event):
        steps.append(event)
        if len(steps) > 5 + 1:  # an estimate and four steps, the estimate and the first step after that
            raise ValueError("the disk is full")

    options = {"steps": 4, "max_drop": 0.05, "permute": False, "progress": False, "report": report}
    with pytest.warns(LearningWarning, match="not learned again: .*the disk is full"):
        masks = halve.learn(model, x, **options, drop_data=x)
    assert masks.recipe["left_dense"]
    assert "the disk is full" in masks.recipe["not_relearned"]
    assert masks.recipe["drop"] <= 0.05


ALL_KEPT = {"steps": 1, "pattern": "4:4", "fallback": False}  # masks that change nothing


@pytest.mark.parametrize("given", [{}, {"drop_data": random(10, 16)}, {"validation": [random(10, 16)]}])
def test_a_budget_below_one_image_is_warned_about_once(given):
    with pytest.warns(LearningWarning) as warned:
        masks = learn(costly(), random(200, 16), **ALL_KEPT, max_drop=0.02, **{"validation": None} | given)
    found = [str(one.message) for one in warned if "max_drop" in str(one.message)]
    assert len(found) == 1
    assert found[0].startswith("max_drop=0.02 on 10 images allows no change at all, since one of them is 10.0 %")
    assert "it takes 50 images or more; pass them with drop_data=" in found[0]
    assert masks.recipe["drop_images"] == 10


@pytest.mark.parametrize("max_drop", [0.1, 0.0])
def test_a_budget_that_images_can_tell_is_not_warned_about(max_drop):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LearningWarning)
        learn(costly(), random(200, 16), **ALL_KEPT, max_drop=max_drop, drop_data=random(10, 16))


def test_too_few_images_are_warned_about_also_if_no_masks_meet_the_budget():
    with pytest.warns(LearningWarning, match=r"max_drop=0.001 on 300 images"), pytest.raises(ModelError):
        enforce_accuracy_budget(costly(), halve.prune(costly(), "random", pattern="1:4"), random(300, 16), 0.001)


def test_images_that_chose_the_layers_give_no_confidence_interval():
    options = {"steps": 1, "lr": 1e-6, "max_drop": 0.05, "permute": False, "progress": False, "fallback": False}
    model, x = costly(), random(2000, 16)
    masks = halve.learn(model, x, **options)
    quality = masks.recipe["quality"]
    assert masks.recipe["left_dense"]
    assert quality["agreement_interval"] is None
    assert "these images also chose the layers" in quality["no_interval"]
    assert halve.report(masks).facts["agreement_interval"] is None
    masks = halve.learn(model, x, drop_data=random(100, 16, seed=5), **options)
    assert masks.recipe["left_dense"]
    assert masks.recipe["quality"]["agreement_interval"][0] < masks.recipe["quality"]["agreement"]
    assert "no_interval" not in masks.recipe["quality"]
    masks = halve.learn(model, x, **options | {"max_drop": 1.0})
    assert masks.recipe["quality"]["agreement_interval"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_drop": 0.1, "min_speedup": 1.5}, "not both"),
        ({"min_speedup": 1.5}, "min_speedup= needs plan="),
        ({"min_speedup": 0.5}, "min_speedup must be at least 1"),
        ({"min_speedup": float("nan")}, "min_speedup must be at least 1"),
    ],
    ids=["both", "no plan", "slower", "NaN"],
)
def test_targets_that_make_no_sense_are_refused(options, error):
    with pytest.raises(OptionError, match=error):
        learn(convnet(), images(), steps=1, drop_data=images(), **options)


@pytest.mark.parametrize("bad", [{"max_drop": 2.0}, {"max_drop": 0.1, "drop_metric": "top5"}])
def test_a_bad_budget_is_refused_before_anything_is_learned(bad):
    seen = []
    with pytest.raises(OptionError):
        learn(convnet(), images(), steps=2, drop_data=images(), report=seen.append, **bad)
    assert seen == []
