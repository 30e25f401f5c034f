import dataclasses
import json
import math
from collections.abc import Sequence
from typing import get_type_hints

import pytest
from torch import nn

import halve
from halve.errors import OptionError
from halve.learn.learn import learn
from halve.learn.schedule import Schedule
from halve.learn.settings import DEFAULT_MINUTES, LearnOptions, Settings, preset_options, split_options
from halve.select.select import SelectOptions
from tests.tiny import convnet, images, labels


def test_only_one_budget_can_be_given():
    for one in ({"steps": 3}, {"epochs": 0.5}, {"minutes": 2}, {}):
        Settings.of(one)
    with pytest.raises(OptionError, match="one budget, got steps=3 and epochs=1"):
        Settings(steps=3, epochs=1)
    with pytest.raises(OptionError, match="steps=3 and epochs=1 and minutes=1"):
        Settings(steps=3, epochs=1, minutes=1)


def test_the_typed_options_are_the_settings_and_those_of_select():
    settings, selection = get_type_hints(Settings), get_type_hints(SelectOptions)
    typed = get_type_hints(LearnOptions)
    assert typed.pop("features") == str | Sequence[str] | None  # which become a tuple
    assert settings.pop("features") == tuple[str, ...] | None
    assert typed == settings | selection
    assert list(settings) == [field.name for field in dataclasses.fields(Settings) if field.name != "features"]


def test_an_unknown_option_is_named_beside_the_known_ones():
    with pytest.raises(OptionError, match=r"no option learning_rate, tau; options are .*lr.*pattern.*temperature"):
        Settings.of({"tau": 1, "learning_rate": 2, "lr": 0.1})
    with pytest.raises(OptionError, match="no option stpes"):
        learn(convnet(), [images(2)], stpes=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"lr": 0}, "lr must be a positive number, got 0"),
        ({"epochs": 0.0}, "epochs must be a positive number, got 0.0"),
        ({"minutes": -1}, "minutes must be a positive number, got -1"),
        ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
        ({"lr": math.nan}, "lr must be a positive number, got nan"),
        ({"epochs": math.inf}, "epochs must be a positive number, got inf"),
        ({"steps": "5"}, "steps must be a positive integer, got '5'"),
        ({"steps": 2.5}, "steps must be a positive integer, got 2.5"),
        ({"alpha": -1.0}, "alpha must be a non-negative number, got -1.0"),
        ({"betas": (1.5, 0.9)}, "betas must be two numbers from 0 to below 1"),
        ({"betas": None}, "betas must be two numbers from 0 to below 1, got None"),
        ({"features": []}, "features must be one or more names or globs of modules.*, got ()"),
        ({"features": 5}, "features must be one or more names.*, got 5"),
        ({"features": ["layer1", 5]}, "features must be one or more names"),
        ({"seed": 2**70}, "seed must be an integer from 0"),
        ({"temperature": 0.0}, "temperature must be a positive number or a pair .*, got 0.0"),
        ({"temperature": (1.0, -1.0)}, "pair"),
        ({"noise": -0.1}, "noise must be a non-negative number or a pair .*, got -0.1"),
        ({"noise": (1.0, float("nan"))}, "non-negative"),
        ({"noise": (1.0, 0.5, 0.0)}, "pair"),
        ({"temperature": (1.0, 1.0, 1.0)}, "pair"),
        ({"schedule": "linear"}, "schedule must be one of cosine, constant, paper, got 'linear'"),
        ({"final": "max"}, "final must be one of argmax, sample, got 'max'"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Settings.of(options)


def test_lists_become_tuples_and_one_feature_a_tuple_of_one():
    settings = Settings.of({"betas": [0.5, 0.6], "temperature": [4, 1], "features": "layer1"})
    assert settings.betas == (0.5, 0.6)
    assert settings.temperatures == (4, 1)
    assert settings.features == ("layer1",)
    assert Settings.of({"features": ["a", "b"]}).features == ("a", "b")
    assert Settings().temperatures == (1.0, 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(temperature=(4.0, 1.0), features=("a", "b"), betas=(0.8, 0.9), minutes=0.5),
        Settings(objective=lambda views: views.output.sum()),
        Settings(start=halve.prune(convnet())),
        Settings(start=lambda name, weight: weight.abs()),
    ],
    ids=["defaults", "tuples", "objective", "masks", "score function"],
)
def test_settings_are_described_in_plain_json(settings):
    described = settings.described()
    assert json.loads(json.dumps(described)) == described


def test_functions_and_masks_are_described_by_name():
    def mine(views):
        return views.output.sum()

    described = Settings(objective=mine, start=halve.prune(convnet())).described()
    assert described["objective"] == "mine"
    assert described["start"].startswith("masks ")
    other = Settings(start=halve.prune(convnet(), "random")).described()
    assert other["start"] != described["start"]


def test_the_preset_is_the_papers_recipe():
    where, how = split_options(preset_options("paper"))
    assert where == {"order": "flat", "remainder": "pad", "kinds": ("conv",)}
    settings = Settings.of(how)
    assert (settings.objective, settings.final, settings.temperature) == ("task", "sample", 0.1)
    assert (settings.lr, settings.betas, settings.weight_decay) == (1.0, (0.9, 0.999), 1e-4)
    assert [Schedule(settings).lr(0.5, epoch) for epoch in (0, 2, 3, 6)] == pytest.approx([1, 1, 0.1, 0.01])
    others = preset_options("paper-tuned").items() - preset_options("paper").items()
    assert dict(others) == {"norms": "track", "temperature": 1.0, "schedule": "cosine", "final": "argmax"}
    assert preset_options(None) == {}
    with pytest.raises(OptionError, match="unknown preset 'papr'; presets are 'paper' and 'paper-tuned'"):
        preset_options("papr")


def test_the_preset_masks_what_the_paper_masks_and_can_be_overridden():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Flatten(), nn.Linear(180, 5))
    data = [(images(6), labels(6))]
    masks = halve.learn(model.eval(), data, preset="paper", steps=3, validation=False)
    assert list(masks) == ["0", "2"]
    assert {(m.layout.order, m.layout.virtual) for m in masks.values()} == {("flat", 0), ("flat", 2)}
    recipe = masks.recipe
    assert (recipe["preset"], recipe["objective"], recipe["start"], recipe["lr"]) == ("paper", "task", "glorot", 1.0)
    options = {"lr": 0.5, "kinds": ("conv", "linear"), "also": "4", "validation": False}
    other = halve.learn(model, data, preset="paper", steps=3, **options).recipe
    assert (other["lr"], other["selection"]["kinds"]) == (0.5, ["conv", "linear"])


def test_options_of_select_and_of_learning_are_told_apart():
    where, how = split_options({"pattern": "1:4", "steps": 3, "exclude": "fc", "lr": 1.0})
    assert where == {"pattern": "1:4", "exclude": "fc"}
    assert how == {"steps": 3, "lr": 1.0}


def test_without_a_budget_there_are_two_minutes():
    assert DEFAULT_MINUTES == 2
    assert Settings().budget_minutes == 2
    assert Settings(minutes=0.5).budget_minutes == 0.5
    assert Settings(steps=5).budget_minutes is None
    assert Settings(epochs=5).budget_minutes is None


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"log": 5}, "log must be the name of a file, got 5"),
        ({"run_state": 5}, "run_state must be the name of a file, got 5"),
        ({"report": 5}, "report must be a function"),
        ({"progress": 5}, "progress must be True, False or a function"),
        ({"permute": "x"}, "permute must be True or False, got 'x'"),
        ({"fallback": "x"}, "fallback must be True or False, got 'x'"),
        ({"augment": 3}, "augment must be True or False, got 3"),
        ({"hard": "no"}, "hard must be True or False, got 'no'"),
    ],
    ids=["log", "run_state", "report", "progress", "permute", "fallback", "augment", "hard"],
)
def test_options_of_a_wrong_type_are_refused(option, error):
    with pytest.raises(OptionError, match=error):
        learn(convnet(), images(), steps=1, **option)
