import math

import pytest
import torch
from torch import nn

import halve
from halve.errors import DataError, ModelError
from halve.learn.frozen import frozen
from halve.learn.held_back import Split
from halve.learn.learner import Learner
from halve.learn.objective import distill_auto
from halve.learn.sampling import Sampler
from halve.learn.settings import Settings
from halve.learn.validation import Quality, Validation
from tests.tiny import convnet, images


def validation(model, batches, forward=None, **settings):
    """Validation of a model whose weights are replaced as in a step."""
    chosen = halve.select(model).masked
    weights = {choice.name: model.get_submodule(choice.name).weight.detach() for choice in chosen}
    sampler = Sampler(chosen, weights, {name: w.abs() for name, w in weights.items()}, 8.0)
    learner = Learner(frozen(model, chosen), sampler, distill_auto, [], forward=forward)
    return Validation(learner, Split("list", [], batches, source="test"), Settings.of(settings))


def prepared(model, batches, most=512, seconds=math.inf, **options):
    result = validation(model, batches, **options)
    result.prepare(most, seconds)
    return result


@pytest.mark.parametrize("score", ["magnitude", "random"])
def test_agreement_and_kl_are_those_of_evaluate(score):
    model, masks = convnet(), halve.prune(convnet(), score)
    found = prepared(model, [images(50), images(30, seed=2)]).quality(masks)
    expected = halve.evaluate(model, masks, [images(50), images(30, seed=2)])
    assert found.agreement == pytest.approx(expected.agreement)
    assert found.kl == found.loss == pytest.approx(expected.kl, rel=1e-4)


def test_the_output_error_is_the_norm_of_the_difference():
    model, masks = convnet(), halve.prune(convnet())
    dense, sparse = (net(images(20)).detach() for net in (model, halve.apply(model, masks)))
    found = prepared(model, [images(20)]).quality(masks)
    assert found.output_error == pytest.approx(float((sparse - dense).norm() / dense.norm()), rel=1e-4)


def test_masks_that_keep_everything_are_perfect():
    model = convnet()
    found = prepared(model, [images(20)]).quality(halve.prune(model, pattern="4:4"))
    assert (found.agreement, found.kl, found.output_error) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (nn.Sequential(*convnet()[:10], nn.Linear(16, 1)), {}),
        (nn.Sequential(*convnet()[:6]), {}),
        (convnet(), {"match": "outputs+features"}),
    ],
    ids=["one number", "feature maps", "told"],
)
def test_outputs_that_are_no_class_scores_are_judged_by_their_error(model, options):
    found = prepared(model.eval(), [images(20)], **options).quality(halve.prune(convnet(), include=["0", "3"]))
    assert (found.agreement, found.kl) == (None, None)
    assert 0 < found.loss == found.output_error < 2


def test_what_was_judged_before_makes_no_difference():
    model = convnet()
    judge = prepared(model, [images(20)])
    one, other = halve.prune(model), halve.prune(model, "random")
    first = judge.quality(one)
    assert judge.quality(other) != first
    assert judge.quality(one) == first


@pytest.mark.parametrize(
    ("sizes", "most", "expected"), [([64] * 9, 512, 512), ([40] * 9, 64, 64), ([100], 64, 64), ([10], 64, 10)]
)
def test_no_more_images_are_read_than_asked_for(sizes, most, expected):
    read = []

    def batches():
        for size in sizes:
            read.append(size)
            yield images(size)

    judge = prepared(convnet(), batches(), most)
    assert judge.images == expected
    assert sum(read) < expected + max(sizes)  # and no batch that is not needed


def test_without_time_eight_images_are_read():
    assert prepared(convnet(), [images(3)] * 20, seconds=0).images == 9
    assert prepared(convnet(), [images(64)] * 20, seconds=0).images == 8


def test_outputs_that_are_not_finite_are_the_worst_there_are():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = convnet()

        def forward(self, x):
            dead = (self.net[0].weight == 0).float().mean() > 0.4
            return self.net(x) * (float("nan") if dead else 1.0)

    model = Broken().eval()
    found = prepared(model, [images(20)]).quality(halve.prune(model))
    assert found.loss == math.inf
    assert found.plain() == {"agreement": found.agreement, "kl": None, "output_error": None}


def test_masked_outputs_of_another_shape_are_an_error_that_says_what_to_do():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = convnet()

        def forward(self, x):
            return self.net(x)[:, : 3 if bool((self.net[0].weight == 0).any()) else 5]

    model = Changing().eval()
    with pytest.raises(ModelError, match=r"\(8, 3\), the dense one \(8, 5\).*validation=False"):
        prepared(model, [images(8)]).quality(halve.prune(model))


def test_no_images_at_all_are_a_data_error():
    with pytest.raises(DataError, match="validation= has no images"):
        prepared(convnet(), [])


def test_reading_images_changes_no_random_numbers_and_depends_on_none():
    def batches():
        yield images(20) + torch.randn(20, 1, 1, 1)

    model, masks = convnet(), halve.prune(convnet())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = prepared(model, batches()).quality(masks)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert prepared(model, batches()).quality(masks) == first


def test_a_quality_in_words():
    assert str(Quality(0.5, 0.25, 0.1)) == "agreement 50.0 %, KL 0.2500"
    assert str(Quality(None, None, 0.1)) == "output error 10.0 %"
