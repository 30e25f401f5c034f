import math
import time

import pytest
import torch

import halve
from halve.errors import DataError
from halve.learn.baseline import Baseline
from halve.learn.initialization import Inputs, select_layers
from halve.learn.settings import Settings
from halve.learn.validation import Quality
from tests.tiny import convnet, images

BATCHES = [images(32), images(32, seed=2)]


class Judge:
    """Prefers masks by what was asked for, and counts."""

    def __init__(self, losses=()):
        self.losses, self.judged = dict(losses), []

    def quality(self, masks):
        found = next(
            name
            for name in ("magnitude", "wanda", "reconstruct", "random")
            if all(torch.equal(masks[n].kept(), m.kept()) for n, m in made(name).items())
        )
        self.judged.append(found)
        return Quality(None, None, self.losses.get(found, 1.0))


def made(score):
    return halve.prune(convnet(), score, BATCHES, seed=3)


def baseline(start="magnitude", progress=None, model=None, **options):
    model = model or convnet()
    settings = Settings.of({"start": start, "seed": 3} | options)
    layers = select_layers(model, {})
    initial = dict(made(start) if isinstance(start, str) and start != "glorot" else made("random"))
    return Baseline(Inputs(model, None, None, progress), layers, layers.choices, settings, initial)


@pytest.mark.parametrize("best", ["magnitude", "wanda", "reconstruct"])
def test_the_best_of_all_scores_is_kept(best):
    found, judge = baseline(), Judge({best: 0.5})
    found.find(judge, BATCHES, math.inf)
    assert judge.judged == ["magnitude", "wanda", "reconstruct"]
    assert (found.best.score, found.best.quality.loss, found.not_tried) == (best, 0.5, {})
    assert all(torch.equal(found.best.masks[name].codes, mask.codes) for name, mask in made(best).items())


@pytest.mark.parametrize(
    ("start", "judged", "best"),
    [
        ("wanda", ["wanda", "magnitude", "reconstruct"], "wanda"),
        ("random", ["random", "magnitude", "wanda", "reconstruct"], "random"),
        ("glorot", ["magnitude", "wanda", "reconstruct"], "magnitude"),
        (made("random"), ["random", "magnitude", "wanda", "reconstruct"], "start"),
        (lambda name, w: w, ["random", "magnitude", "wanda", "reconstruct"], "<lambda>"),
    ],
    ids=["wanda", "random", "glorot", "masks", "function"],
)
def test_the_masks_that_learning_starts_from_are_among_them_unless_they_are_random_logits(start, judged, best):
    found, judge = baseline(start), Judge()
    found.find(judge, BATCHES, math.inf)
    assert judge.judged == judged
    assert found.best.score == best


def test_without_time_there_are_still_magnitudes():
    found, judge = baseline(), Judge()
    found.find(judge, BATCHES, seconds=0)
    assert judge.judged == ["magnitude"]
    assert found.not_tried == dict.fromkeys(("wanda", "reconstruct"), "it would not have finished in time")


def test_a_score_is_given_up_as_soon_as_it_is_clear_that_it_takes_too_long():
    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = convnet()

        def forward(self, x):
            time.sleep(0.05)
            return self.net(x)

    model = Slow().eval()
    layers = select_layers(model, {})
    initial = dict(halve.prune(model))
    found = Baseline(Inputs(model, None), layers, layers.choices, Settings(), initial)
    started = time.perf_counter()
    found.find(type("Any", (), {"quality": lambda *_: Quality(None, None, 1.0)}), [images(2)] * 100, seconds=1)
    assert time.perf_counter() - started < 0.5
    assert list(found.not_tried) == ["wanda", "reconstruct"]


def test_it_stops_when_the_user_does():
    found = baseline()
    found.find(Judge(), BATCHES, math.inf, stop=lambda: True)
    assert found.best.score == "magnitude"
    assert len(found.not_tried) == 2


def test_a_score_that_fails_is_left_out_with_the_reason():
    found = baseline()
    found.find(Judge(), [images(4) * float("nan")], math.inf)
    assert found.best.score == "magnitude"
    assert all("NaN or infinite inputs" in reason for reason in found.not_tried.values())


def test_what_takes_long_is_shown():
    shown = []

    def progress(items, what):
        shown.append(what)
        return items

    baseline(progress=progress).find(Judge(), BATCHES, math.inf)
    assert set(shown) >= {"one-shot masks: activations", "one-shot masks: reconstruction"}


def test_a_failure_of_the_judge_is_not_taken_for_one_of_a_score():
    class Broken:
        def quality(self, masks):
            raise DataError("a broken image")

    with pytest.raises(DataError, match="a broken image"):
        baseline().find(Broken(), BATCHES, math.inf)
