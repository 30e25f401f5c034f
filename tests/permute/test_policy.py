import pytest
import torch

import halve
from halve.errors import ModelError
from halve.permute import policy as reorder
from halve.permute.policy import graded_by, seconds_for, why_not
from tests.tiny import convnet, images, loader


@pytest.mark.parametrize(
    ("given", "asked", "minutes", "expected"),
    [
        (None, True, 0.1, 120.0),
        (None, False, 0.1, 1.5),
        (None, False, 60.0, 120.0),
        (None, False, None, 30.0),
        (7, False, None, 7),
        (500.0, False, 1.0, 500.0),
    ],
)
def test_a_search_that_nobody_asked_for_is_short(given, asked, minutes, expected):
    assert seconds_for(given, asked, minutes) == expected


@pytest.mark.parametrize("seconds", [-1, "5", float("nan")])
def test_times_that_are_none_are_refused_even_if_nobody_asked(seconds):
    with pytest.raises(ModelError, match="permute_seconds"):
        halve.learn(convnet(), loader(), steps=1, permute_seconds=seconds)


def test_orders_are_searched_by_a_score_that_grades_each_weight():
    assert [graded_by(score) for score in ("magnitude", "wanda", "reconstruct", "glorot")] == [
        "magnitude",
        "wanda",
        "wanda",
        "magnitude",
    ]
    assert graded_by(torch.abs) is torch.abs


def test_a_reason_is_one_line():
    assert why_not(ModelError("it is odd\nin many ways")) == "it is odd"
    assert why_not(KeyError()) == "KeyError: "
    assert why_not(RuntimeError("x" * 500)) == "RuntimeError: " + "x" * 160


@pytest.mark.parametrize(("score", "power"), [("magnitude", 1), ("wanda", 2)])
def test_orders_are_searched_by_magnitudes_as_they_are_and_by_squares_of_wandas_scores(monkeypatch, score, power):
    given = []
    monkeypatch.setattr(reorder, "permute", lambda model, choices, found, *_, **__: given.append(found))
    found = {"0": torch.tensor([[0.5, 3.0]])}
    reorder.reordered(convnet(), [], score, found, images(), 1.0)
    assert torch.equal(given[0]["0"], found["0"] ** power)
