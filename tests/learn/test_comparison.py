import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve.errors import DataError, LearningError, LearningWarning
from halve.learn.comparison import Plan
from halve.learn.held_back import hold_back
from halve.learn.reporting import Report
from tests.tiny import convnet, images, interrupting, labels, learn, loader
from tests.untouched import untouched

RANDOM = {"steps": 1, "lr": 1e-6, "alpha": 0.0, "final": "sample"}  # what is learned is a random mask
QUICK = {"steps": 12, "lr": 0.1}


def network():
    """A network that predicts each class for some images, and is sure of it."""
    model = convnet()
    with torch.no_grad():
        model[10].weight *= 40
        model[10].bias -= model(images(64)).mean(0)
    return model


def validated(data=None, model=None, **options):
    """`learn` with the comparison, which the other tests leave out."""
    options = {"validation": None, "permute": False} | options
    return halve.learn(model or network(), loader(128) if data is None else data, **options)


def kl_of(masks, data):
    return halve.evaluate(network(), masks, data).kl


def test_masks_that_are_worse_than_one_shot_masks_are_replaced_by_them_and_the_user_is_told():
    held = list(hold_back(loader(128)).held_back)
    learned = learn(network(), hold_back(loader(128)).data, **RANDOM)
    with pytest.warns(LearningWarning, match=r"worse than one-shot masks on 8 images .*fallback=False") as told:
        masks = validated(**RANDOM)
    quality = masks.recipe["quality"]
    assert kl_of(masks, held) < kl_of(learned, held)
    assert quality["returned"] == quality["one_shot"]["score"] in str(told[0].message)
    assert quality["kl"] == quality["one_shot"]["kl"] == pytest.approx(kl_of(masks, held), abs=1e-5)
    assert quality["learned"]["kl"] == pytest.approx(kl_of(learned, held), abs=1e-4)
    assert masks.recipe["method"] == "learn"
    assert halve.verify(halve.apply(network(), masks), masks).ok


def test_masks_that_are_better_are_returned_without_a_word():
    data, options = images(64), {"steps": 150, "match": "probabilities", "augment": False}
    masks = validated(data, validation=data, **options)
    quality = masks.recipe["quality"]
    assert quality["returned"] == "learned"
    assert quality["learned"]["kl"] == quality["kl"] < quality["one_shot"]["kl"]
    assert masks == learn(network(), data, **options)
    assert 0.5 < quality["agreement"] <= 1
    assert json.loads(json.dumps(masks.recipe)) == masks.recipe


@pytest.mark.parametrize("options", [{"fallback": False}, {"preset": "paper"}], ids=["fallback", "preset"])
def test_without_a_fallback_and_with_presets_what_was_learned_is_returned(options):
    masks = validated(**RANDOM | options)
    quality = masks.recipe["quality"]
    assert quality["returned"] == "learned"
    assert quality["kl"] == quality["learned"]["kl"] > quality["one_shot"]["kl"]
    left = {key: value for key, value in options.items() if key != "fallback"}
    assert masks == learn(network(), hold_back(loader(128)).data, **RANDOM | left)


def seen_by(**options):
    """The sums of all images that masks were learned from."""
    seen = set()

    def objective(views):
        seen.update(round(value, 3) for value in views.batch[0].sum((1, 2, 3)).tolist())
        return (views.output - views.dense_output).square().mean()

    masks = validated(objective=objective, fallback=False, **options)
    return seen, masks


@pytest.mark.parametrize("start", ["magnitude", "wanda", "reconstruct"])
def test_what_is_held_back_is_never_learned_from(start):
    seen, masks = seen_by(epochs=3, start=start)
    held = {round(value, 3) for batch in hold_back(loader(128)).held_back for value in batch[0].sum((1, 2, 3)).tolist()}
    everything = {round(value, 3) for value in images(128).sum((1, 2, 3)).tolist()}
    assert len(held) == masks.recipe["quality"]["images"] == 8
    assert seen == everything - held


def test_images_of_a_user_replace_those_that_are_held_back():
    seen, masks = seen_by(epochs=1, validation=[images(20, seed=7)])
    assert len(seen) == 128
    quality = masks.recipe["quality"]
    assert (quality["images"], quality["source"]) == (20, "validation=")
    assert quality["kl"] == pytest.approx(kl_of(masks, [images(20, seed=7)]), abs=1e-5)


@pytest.mark.parametrize("validation", [[images(20, seed=7)], False], ids=["given", "none"])
def test_images_that_are_not_held_back_change_nothing_of_what_is_learned(validation):
    one, other = (validated(steps=9, fallback=False, validation=given) for given in (validation, [images(64, seed=8)]))
    assert one == other


def test_without_validation_the_quality_is_unknown_and_nobody_is_warned():
    recipe = validated(steps=2, validation=False).recipe
    assert recipe["quality"] == {"unknown": "validation=False"}


def test_with_few_images_the_quality_is_unknown_and_the_user_is_warned_at_the_start():
    def report(event):
        raise SystemExit

    unknown = "quality of the masks will be unknown: 24 images are too few to hold any back.*validation="
    with pytest.warns(LearningWarning, match=unknown), pytest.raises(SystemExit):
        validated(loader(24), steps=2, report=report)
    with pytest.warns(LearningWarning, match=unknown):
        masks = validated(loader(24), steps=2)
    assert masks.recipe["quality"]["unknown"].startswith("24 images are too few")
    assert masks == learn(network(), loader(24), steps=2)


def test_a_stream_says_that_its_images_may_recur():
    class Stream:
        def __iter__(self):
            return iter(images(300).split(20))

    masks = validated(Stream(), steps=3, fallback=False)
    assert masks.recipe["quality"]["source"] == "the first images of the stream, which may recur"
    assert masks.recipe["quality"]["images"] == 64  # enough for a run of three steps


def test_two_runs_say_the_same_and_another_seed_holds_back_other_images():
    first, again, other = (validated(**QUICK, seed=seed, fallback=False) for seed in (0, 0, 1))
    assert first.recipe["quality"]["learned"] == again.recipe["quality"]["learned"]
    assert first.recipe["quality"]["learned"] != other.recipe["quality"]["learned"]


def test_the_model_and_the_random_numbers_stay_as_they_are():
    model = network().train()
    state = torch.get_rng_state()
    with untouched(model):
        validated(images(128), model, steps=3, fallback=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_without_class_scores_is_judged_by_its_outputs():
    model = nn.Sequential(*network()[:6]).eval()
    with pytest.warns(LearningWarning, match="output error .* against output error"):
        masks = validated(model=model, **RANDOM, match="outputs")
    quality = masks.recipe["quality"]
    assert (quality["agreement"], quality["kl"]) == (None, None)
    assert quality["output_error"] == quality["one_shot"]["output_error"] < quality["learned"]["output_error"]


def test_an_interrupted_run_is_judged_as_well():
    with pytest.warns(LearningWarning, match="interrupted after 5 steps"):
        masks = validated(**QUICK, report=interrupting(5), fallback=False)
    assert (masks.recipe["ended"], masks.recipe["quality"]["images"]) == ("interrupted", 8)


def test_a_run_that_is_interrupted_before_its_first_step_is_not_judged():
    def report(event):
        raise KeyboardInterrupt

    with pytest.warns(LearningWarning, match="interrupted after 0 steps"):
        masks = validated(steps=3, report=report)
    assert masks.recipe["quality"] == {"unknown": "interrupted"}


@pytest.mark.filterwarnings("ignore:the learned masks are worse")
@pytest.mark.parametrize("options", [{**QUICK, "fallback": False}, RANDOM], ids=["learned", "fallback"])
def test_a_finished_run_that_is_resumed_is_judged_again(tmp_path, options):
    options = options | {"run_state": tmp_path / "run", "save_every": 0}
    first, again = validated(**options).recipe, validated(**options, resume=True).recipe
    assert again["quality"]["learned"] == first["quality"]["learned"]
    assert again["quality"]["images"] == first["quality"]["images"]
    assert (again["quality"]["returned"] == "learned") == ("fallback" in options)


@pytest.mark.parametrize("step", [1, 7])
def test_interrupted_and_resumed_is_the_same_as_uninterrupted_with_images_held_back(tmp_path, step):
    options = {**QUICK, "fallback": False, "save_every": 0}
    expected = validated(**options, run_state=tmp_path / "whole")
    with pytest.warns(LearningWarning, match=f"interrupted after {step} steps"):
        validated(**options, run_state=tmp_path / "run", report=interrupting(step))
    masks = validated(**options, run_state=tmp_path / "run", resume=True)
    assert masks == expected
    assert masks.recipe["quality"]["learned"] == expected.recipe["quality"]["learned"]


def test_layers_that_are_left_dense_count_in_what_is_recorded():
    masks = validated(**QUICK, max_drop=0.4, drop_data=[images(64)], validation=[images(64)], fallback=False)
    quality = masks.recipe["quality"]
    assert 0 < len(masks) < 3
    assert quality["agreement"] == pytest.approx(1 - masks.recipe["drop"])
    assert (quality["learned"], quality["one_shot"]) == (None, None)  # of masks in all layers


def test_a_network_that_fails_at_the_end_keeps_what_was_learned():
    learned = []

    def report(event):
        if isinstance(event, Report) and event.step == event.steps:
            learned.append(True)

    def forward(model, batch):
        if learned:
            raise RuntimeError("the sensor is off")
        return model(batch[0])

    with pytest.raises(LearningError, match=r"the sensor is off.*the masks as learned") as error:
        validated(steps=3, report=report, forward=forward)
    assert error.value.masks.recipe["steps_done"] == 3


def test_validation_images_that_are_broken_are_told_before_the_first_step():
    seen = []
    with pytest.raises(DataError, match=r"\(8, 2, 8, 8\)"):
        validated(steps=3, validation=[images(8)[:, :2]], report=seen.append)
    assert not any(isinstance(event, Report) for event in seen)
    with pytest.raises(DataError, match="validation= has no images"):
        validated(steps=3, validation=[])


def test_a_plan_bounds_what_is_done_besides_learning():
    assert Plan(None, 200.0, 0.5, 64).for_validation() == (512, 4.0)
    assert [Plan(None, 200.0, each, 64).for_one_shot() for each in (20, 0.5, 0.1)] == [100.0, 30.0, 10.0]
    assert Plan(None, 1e6, 0.1, 64).for_one_shot() == 300.0
    few, many = Plan(2, None, 0.5, 64), Plan(10_000, None, 0.5, 64)
    assert few.for_validation() == (64, math.inf)
    assert many.for_validation() == (512, math.inf)
    assert [Plan(steps, None, 0.5, 64).for_one_shot() for steps in (2, 20, 200, 800, 10_000)] == [5, 10, 30, 60, 250]
    assert [Plan(steps, None, 0.02, 64).for_one_shot() for steps in (1_000, 10_000)] == [5, 10]


def test_labels_are_not_needed_where_dicts_are_batches():
    data = [{"image": images(16, seed=i), "label": labels(16)} for i in range(8)]
    masks = validated(data, steps=2, fallback=False)
    assert masks.recipe["quality"]["images"] == 8


def test_workers_read_what_is_held_back():
    data = DataLoader(TensorDataset(images(128)), 16, num_workers=2, persistent_workers=True)
    assert validated(data, steps=2, fallback=False).recipe["quality"]["images"] == 8


def test_masks_that_are_learned_on_without_a_fallback_are_only_compared_with_themselves():
    model, data = convnet(), images(96)
    first = halve.learn(model, data, steps=2, fallback=False, progress=False)
    again = halve.learn(model, data, steps=2, start=first, fallback=False, progress=False).recipe["quality"]
    assert again["one_shot"]["score"] == "start"
    assert again["one_shot"]["kl"] == pytest.approx(first.recipe["quality"]["kl"], rel=1e-4)
    assert all("continues" in reason for reason in again["not_tried"].values())
    assert {"wanda", "reconstruct"} <= again["not_tried"].keys()
