import pytest
import torch

import halve
from halve.errors import DataError, OptionError
from halve.prune.score import LayerScores, Score, ScoreInputs
from halve.prune.scores import SCORES, check_data, score_of
from halve.select.select import masked_weights, select
from tests import tiny


def inputs_of(model, **options):
    chosen = select(model)
    return ScoreInputs(model, chosen.masked, masked_weights(model, chosen), **options)


@pytest.mark.parametrize("name", SCORES)
def test_every_score_keeps_what_the_registry_says_of_it(name):
    score, inputs = SCORES[name], inputs_of(tiny.convnet(), data=tiny.images())
    assert score.name == name
    found = score.compute(inputs)
    assert {layer: value.shape for layer, value in found.by_layer.items()} == {
        layer: weight.shape for layer, weight in inputs.weights.items()
    }
    assert found.images == (24 if score.needs_data else 0)
    values = {float(number) for value in found.by_layer.values() for number in value.unique()}
    assert (values == {0.0, 1.0}) == score.whole_masks
    assert (score.search_score or score).whole_masks is False


def test_scores_that_need_data_say_so():
    for name, score in SCORES.items():
        if score.needs_data:
            with pytest.raises(DataError, match=f"score '{name}' needs data"):
                check_data(score, None)
        check_data(score, tiny.images())


def test_orders_are_searched_by_a_score_of_single_weights_and_by_squares_of_wandas():
    searched = {name: (score.search_score or score).name for name, score in SCORES.items()}
    assert searched == {"magnitude": "magnitude", "wanda": "wanda", "reconstruct": "wanda", "random": "random"}
    found = LayerScores({"0": torch.tensor([[0.5, 3.0]])})
    assert SCORES["magnitude"].for_search(found) == found.by_layer
    assert torch.equal(SCORES["wanda"].for_search(found)["0"], found.by_layer["0"] ** 2)


def test_random_scores_depend_on_the_seed_alone():
    model, state = tiny.convnet(), torch.get_rng_state()
    one, same, other = (SCORES["random"].compute(inputs_of(model, seed=seed)).by_layer for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_new_score_needs_one_entry_of_the_registry(monkeypatch):
    def smallest(inputs):
        return LayerScores({name: -weight.abs() for name, weight in inputs.weights.items()})

    monkeypatch.setitem(SCORES, "smallest", Score("smallest", "the smallest weights", smallest))
    model = tiny.convnet()
    masks = halve.prune(model, "smallest")
    assert masks.recipe["score"] == "smallest"
    assert halve.prune(model, lambda name, weight: -weight.abs()) == masks
    learned = tiny.learn(model, tiny.images(), steps=1, lr=1e-9, start="smallest", noise=0.0)
    assert learned.difference(masks) == 0


@pytest.mark.parametrize("score", ["wanda2", "", None, ["magnitude"]])
def test_an_unknown_score_is_refused_with_the_known_ones(score):
    with pytest.raises(OptionError, match="magnitude, wanda, reconstruct, random"):
        score_of(score)
