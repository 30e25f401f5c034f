from pathlib import Path

import pytest
import torch

from halve.cli import options as o
from halve.errors import HalveError
from halve.sources.preprocessing import IMAGENET_STD, Preprocessing


def selection(*patterns):
    return o.selection(list(patterns) or None, None, None, None, "channels", "skip")


def pattern_of(layer, *patterns):
    from fnmatch import fnmatchcase

    rules = selection(*patterns)["pattern"]
    return next((rule for glob, rule in rules.items() if fnmatchcase(layer, glob)), None)


def test_the_pattern_is_2_4_by_default():
    assert pattern_of("body") == "2:4"


def test_patterns_are_given_for_all_layers_or_for_some():
    assert pattern_of("body", "1:4") == "1:4"
    assert pattern_of("body", "b*=1:2", "2:4") == "1:2"
    assert pattern_of("stem", "b*=1:2", "2:4") == "2:4"
    assert pattern_of("body", "b*=dense", "2:4") is None


def test_layers_that_no_glob_names_get_the_default_pattern():
    assert pattern_of("stem", "body=dense") == "2:4"
    assert pattern_of("stem", "body=1:4") == "2:4"


def test_the_first_pattern_that_matches_wins():
    assert pattern_of("body", "1:2", "body=1:4") == "1:4"
    assert pattern_of("other", "1:2", "body=1:4") == "1:2"
    assert pattern_of("body", "body=1:4", "body=1:2") == "1:4"


def test_options_that_are_not_given_are_none():
    assert selection()["include"] is None
    chosen = o.selection(None, ["a"], ["b"], ["c"], "flat", "pad")
    assert (chosen["include"], chosen["exclude"], chosen["also"]) == (["a"], ["b"], ["c"])
    assert (chosen["order"], chosen["remainder"]) == ("flat", "pad")


@pytest.mark.parametrize(
    ("model", "weights", "expected"),
    [
        ("zoo.py:net", None, "net.masks.safetensors"),
        ("a/b/zoo.py:net", None, "net.masks.safetensors"),
        ("torchvision:resnet18@IMAGENET1K_V1", None, "resnet18.masks.safetensors"),
        ("zoo.py:net", "runs/7/best.pth", "runs/7/best.masks.safetensors"),
        ("zoo.py:net", "runs/7/best.safetensors", "runs/7/best.masks.safetensors"),
        ("zoo.py:net", "runs/7/best.packed.safetensors", "runs/7/best.masks.safetensors"),
    ],
)
def test_masks_are_written_beside_the_checkpoint_by_default(model, weights, expected):
    assert o.default_masks_path(model, weights and Path(weights)) == Path(expected)


def test_checkpoints_with_dots_in_their_names_get_masks_of_their_own():
    paths = {o.default_masks_path("zoo.py:net", Path(name)) for name in ("net.v1.pth", "net.v2.pth")}
    assert len(paths) == 2
    hidden = o.default_masks_path("zoo.py:net", Path(".best.pth"))
    assert hidden.name == ".best.masks.safetensors"


def test_options_for_images_replace_the_models_own_preprocessing():
    opened = o.open_model("torchvision:squeezenet1_1", None, "cpu", size=32, mean="0.5,0.25,0")
    assert opened.preprocess == Preprocessing(32, None, (0.5, 0.25, 0.0), IMAGENET_STD)
    own = o.open_model("torchvision:squeezenet1_1", None, "cpu")
    assert own.preprocess is own.source.preprocess


def test_a_model_that_says_nothing_about_images_gets_the_usual_preprocessing(folder):
    assert o.open_model(f"{folder}/zoo.py:net", None).preprocess == Preprocessing()


def test_random_weights_are_noted(capsys):
    o.open_model("torchvision:squeezenet1_1", None, "cpu")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "note: torchvision:squeezenet1_1 has random weights" in shown.err


def test_the_model_is_moved_to_its_device(folder):
    opened = o.open_model(f"{folder}/zoo.py:net", None, "cpu")
    assert opened.device == torch.device("cpu")
    with pytest.raises(HalveError, match="device 'tpu9' cannot be used"):
        o.open_model(f"{folder}/zoo.py:net", None, "tpu9")


def test_lists_of_numbers_are_read_and_anything_else_is_named(folder):
    with pytest.raises(HalveError, match=r"'0\.5;0\.5' is not a list of numbers"):
        o.open_model(f"{folder}/zoo.py:net", None, mean="0.5;0.5")
