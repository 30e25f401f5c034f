import pytest
import torch
from torch import nn

import halve
from halve.errors import OptionError
from halve.permute.policy import orders_of, search_by_default, search_seconds
from halve.select.select import select
from tests.tiny import convnet, images, loader


@pytest.mark.parametrize(
    ("given", "asked", "minutes", "steps", "expected"),
    [
        (None, True, 0.1, None, 1.5),
        (None, True, None, None, 120.0),
        (None, False, 0.1, None, 1.5),
        (None, False, 60.0, None, 120.0),
        (None, False, None, None, 30.0),
        (None, False, None, 2, 0.5),
        (None, False, None, 5000, 30.0),
        (7, False, None, 2, 7),
        (500.0, False, 1.0, None, 500.0),
    ],
)
def test_a_search_that_nobody_asked_for_is_short(given, asked, minutes, steps, expected):
    assert search_seconds(given, asked, minutes, steps) == expected


def test_two_steps_do_not_wait_for_a_search_that_would_take_long():
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())), nn.Linear(768, 4))
    summary = halve.learn(model.eval(), torch.randn(8, 768), steps=2, validation=False).recipe["permute"]
    assert not summary["finished"]
    assert summary["seconds"] < 10  # 0.5, and capturing the network


def test_a_search_as_long_as_the_whole_call_is_refused():
    with pytest.raises(OptionError, match="permute_seconds=60 leaves no time to learn: the call takes 60 seconds"):
        halve.learn(convnet(), loader(), minutes=1, permute_seconds=60)


@pytest.mark.parametrize("seconds", [-1, "5", float("nan")])
def test_invalid_times_are_refused_even_if_nobody_asked(seconds):
    with pytest.raises(OptionError, match="permute_seconds"):
        halve.learn(convnet(), loader(), steps=1, permute_seconds=seconds)


def test_by_default_orders_are_searched_by_scores_along_channels_and_not_for_presets():
    choices, flat = (select(convnet(), order=order).masked for order in ("channels", "flat"))
    assert search_by_default("magnitude", None, choices)
    assert search_by_default(lambda name, weight: weight, None, choices)
    assert not search_by_default("magnitude", "paper", choices)
    assert not search_by_default("magnitude", None, flat)
    assert not search_by_default("glorot", None, choices)
    assert not search_by_default(halve.MaskSet({}), None, choices)


def test_masks_bring_their_orders_to_the_layers_that_they_fit():
    model = convnet()
    masks = halve.prune(model, permute=True, example=images())
    found = orders_of(masks, select(model).masked)
    assert [choice.layout for choice in found.choices] == [mask.layout for mask in masks.values()]
    assert found.moves == masks.moves
    other = select(model, pattern="1:2").masked
    assert orders_of(masks, other).choices == tuple(other)
    assert orders_of(halve.prune(model), other) is None
