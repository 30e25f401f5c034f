import shutil
import sys

import pytest
from safetensors.torch import load_file

from halve.sources.weights import save_state

KEYS = {
    "task",
    "images",
    "outputs",
    "top1",
    "top5",
    "agreement",
    "agreement_interval",
    "kl",
    "dense_top1",
    "dense_top5",
}


def test_evaluate_counts_the_dense_model(halve, net):
    result = halve("evaluate", *net, "--data", "photos")
    assert result.out.splitlines()[0] == "zoo.py:net on photos, 12 images"
    assert "model" in result.out
    assert result.err == ""
    numbers = halve("evaluate", *net, "--data", "photos", "--json").json
    assert set(numbers) == KEYS
    assert numbers["images"] == 12
    assert 0 <= numbers["top1"] <= numbers["top5"] <= 1
    assert numbers["agreement"] is numbers["kl"] is numbers["dense_top1"] is None


def test_dali_decodes_the_images_of_the_command_line(halve, net, masks):
    pytest.importorskip("nvidia.dali")
    options = ["evaluate", *net, "--data", "photos", "--masks", masks, "--size", "8", "--json"]
    ours, dalis = (halve(*options, "--loader", name).json for name in ("pillow", "dali"))
    assert dalis["images"] == ours["images"] == 12
    assert dalis["kl"] == pytest.approx(ours["kl"], rel=0.05)


def test_a_loader_that_is_missing_or_unknown_is_an_error(halve, net, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # importing it raises
    assert "pip install 'halve[dali]'" in halve("evaluate", *net, "--data", "photos", "--loader", "dali", code=2).err
    assert "one of pillow, dali" in halve("evaluate", *net, "--data", "photos", "--loader", "ffcv", code=2).err


def test_evaluate_compares_masks_with_the_dense_model(halve, net, masks):
    dense = halve("evaluate", *net, "--data", "photos", "--json").json
    both = halve("evaluate", *net, "--data", "photos", "--masks", masks, "--json").json
    assert (both["dense_top1"], both["dense_top5"]) == (dense["top1"], dense["top5"])
    assert 0 <= both["agreement"] <= 1
    assert both["kl"] > 0
    out = halve("evaluate", *net, "--data", "photos", "--masks", masks).out
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["dense", "masked"]


def test_several_mask_files_are_compared_in_one_table(halve, net, masks, folder):
    halve("prune", *net, "--score", "random", "--out", "random.masks.safetensors")
    arguments = ("evaluate", *net, "--data", "photos", "--masks", masks, "--masks", "random.masks.safetensors")
    result = halve(*arguments)
    assert [line.split()[0] for line in result.out.splitlines()[2:]] == ["dense", masks, "random.masks.safetensors"]
    found = halve(*arguments, "--json").json
    assert [one["masks"] for one in found] == [masks, "random.masks.safetensors"]
    for one in found:
        alone = halve("evaluate", *net, "--data", "photos", "--masks", one["masks"], "--json").json
        assert one == {"masks": one["masks"]} | alone
    assert found[0]["kl"] != found[1]["kl"]


def test_a_mask_file_that_cannot_be_read_is_noticed_before_the_others_are_measured(halve, net, masks):
    result = halve("evaluate", *net, "--data", "photos", "--masks", masks, "--masks", "nothing", code=2)
    assert "nothing" in result.err
    assert "images" not in result.err


def test_evaluate_gives_the_same_numbers_for_any_batch_and_for_the_applied_checkpoint(halve, net, masks):
    arguments = ("--data", "photos", "--json")
    halve("apply", *net, "--masks", masks, "--out", "sparse.safetensors")
    masked = halve("evaluate", *net, "--masks", masks, *arguments).json
    applied = halve("evaluate", "zoo.py:net", "--weights", "sparse.safetensors", "--batch", "5", *arguments).json
    assert (masked["top1"], masked["top5"]) == (applied["top1"], applied["top5"])


def test_images_limits_the_images(halve, net):
    assert halve("evaluate", *net, "--data", "photos", "--images", "5", "--json").json["images"] == 5


def test_pictures_without_labels_still_give_agreement(halve, net, masks, folder):
    result = halve("evaluate", *net, "--data", "photos/ant", "--masks", masks, "--json").json
    assert result["top1"] is None
    assert result["agreement"] is not None


def test_evaluating_pictures_without_labels_and_without_masks_says_that_nothing_was_measured(halve, net):
    result = halve("evaluate", *net, "--data", "photos/ant", code=2)
    assert "label" in result.err


@pytest.fixture
def some(folder):
    """Two of the six classes, and the list of all."""
    for name in ("cat", "fox"):
        shutil.copytree(folder / "photos" / name, folder / "some" / name)
    (folder / "classes.txt").write_text("ant\nbee\ncat\ndog\nemu\nfox\n")
    return "some"


def test_a_class_list_makes_some_classes_count_as_they_do_among_all(halve, net, some, folder):
    listed = halve("evaluate", *net, "--data", some, "--classes", "classes.txt", "--json").json
    hits = sum(
        2 * halve("evaluate", *net, "--data", part, "--classes", "classes.txt", "--json").json["top1"]
        for part in (single(folder, "cat"), single(folder, "fox"))
    )
    assert listed["images"] == 4
    assert listed["top1"] == hits / 4


def single(folder, name):
    shutil.copytree(folder / "photos" / name, folder / f"only-{name}" / name)
    return f"only-{name}"


def test_fewer_class_folders_than_outputs_are_pointed_out(halve, net, some):
    result = halve("evaluate", *net, "--data", some)
    assert "--classes" in result.err


def test_an_advice_on_the_command_line_names_an_option_of_it(halve, net, folder):
    for i in range(7):
        shutil.copytree(folder / "photos" / "cat", folder / "many" / f"c{i}")
    result = halve("evaluate", *net, "--data", "many", code=2)
    assert "--classes" in result.err
    assert "classes=" not in result.err


def test_pictures_of_different_sizes_need_a_size(halve, net, folder):
    from tests.pictures import encoded

    (folder / "photos" / "ant" / "wide.png").write_bytes(encoded(1, (12, 8)))
    assert "--size N" in halve("evaluate", *net, "--data", "photos", code=2).err
    halve("evaluate", *net, "--data", "photos", "--size", "8")
    halve("evaluate", *net, "--data", "photos", "--size", "8", "--resize", "10", "--mean", "0,0,0", "--std", "1,1,1")


def test_resize_without_size_is_refused_since_it_would_do_nothing(halve, net):
    assert "--size" in halve("evaluate", *net, "--data", "photos", "--resize", "32", code=2).err


def test_evaluate_warns_of_changed_weights_on_standard_error_and_prints_json_alone(halve, net, masks, folder):
    state = {n: v * 1.01 if v.is_floating_point() else v for n, v in load_file(folder / "net.safetensors").items()}
    save_state(state, folder / "changed.safetensors")
    arguments = ("zoo.py:net", "--weights", "changed.safetensors", "--masks", masks, "--data", "photos", "--json")
    result = halve("evaluate", *arguments)
    assert set(result.json) == KEYS
    assert "warning: the weights of 2 masked layer(s) changed" in result.err
    assert "error: " in halve("evaluate", *arguments, "--on-changed", "error", code=2).err


DENSE_PREDICTION = """
import torch
from torch import nn
from tests.detectors import ssd


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.idle = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), nn.Conv2d(8, 8, 3)
        self.head = nn.Conv2d(8, 4, 1, bias=False)

    def forward(self, x):
        return self.head(self.body(x).relu())


class Named(Maps):
    def forward(self, x):
        return {"out": super().forward(x)}


def maps():
    return Maps().eval()


def named():
    return Named().eval()


def boxes():
    return ssd()
"""


@pytest.fixture
def predicting(folder):
    (folder / "predicting.py").write_text(DENSE_PREDICTION)
    return folder


def test_maps_of_classes_are_evaluated_once_it_is_known_that_they_are(halve, predicting):
    halve("prune", "predicting.py:named", "--out", "maps.masks.safetensors")
    arguments = ("--masks", "maps.masks.safetensors", "--data", "photos")
    assert "--task segmentation" in halve("evaluate", "predicting.py:maps", *arguments, code=2).err
    result = halve("evaluate", "predicting.py:maps", *arguments, "--task", "segmentation", "--json").json
    assert list(result) == [
        *("task", "images", "outputs", "top1", "miou"),
        *("agreement", "miou_to_dense", "kl", "dense_top1", "dense_miou"),
    ]
    assert (result["task"], result["images"], result["outputs"]) == ("segmentation", 12, 4)
    assert 0 < result["miou_to_dense"] <= result["agreement"] < 1
    shown = halve("evaluate", "predicting.py:named", *arguments).out.splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["dense", "masked"]
    assert "mIoU to dense" in shown[1]
    assert "error: " in halve("evaluate", "predicting.py:maps", *arguments, "--task", "maps", code=2).err


def test_boxes_in_pictures_of_different_sizes_are_evaluated(halve, predicting):
    from tests.pictures import encoded

    (predicting / "photos" / "ant" / "wide.png").write_bytes(encoded(1, (12, 8)))
    halve("prune", "predicting.py:boxes", "--data", "photos", "--score", "wanda", "--out", "boxes.masks.safetensors")
    arguments = ("predicting.py:boxes", "--masks", "boxes.masks.safetensors", "--data", "photos")
    result = halve("evaluate", *arguments, "--json").json
    assert list(result) == ["task", "images", "boxes", "dense_boxes", "agreement", "precision", "recall"]
    assert (result["task"], result["images"]) == ("detection", 13)
    assert 0 < result["agreement"] < 1
    some = halve("evaluate", *arguments, "--min-score", "0.9", "--json").json
    assert 0 < some["dense_boxes"] < result["dense_boxes"]
    shown = halve("evaluate", *arguments).out.splitlines()
    assert shown[1].split() == ["boxes", "agreement", "precision", "recall"]
    assert shown[2].split() == ["dense", f"{result['dense_boxes']:,}"]
    assert halve("evaluate", *arguments, "--min-score", "1", "--json").json["agreement"] is None
    assert "neither network returned a box with a score of 1.0" in halve("evaluate", *arguments, "--min-score", "1").err


def test_pictures_for_a_detector_are_not_normalised_twice(halve, predicting):
    halve("prune", "predicting.py:boxes", "--out", "boxes.masks.safetensors")
    arguments = ("evaluate", "predicting.py:boxes", "--masks", "boxes.masks.safetensors", "--data", "photos", "--json")
    plain = halve(*arguments).json
    assert plain == halve(*arguments, "--mean", "0,0,0", "--std", "1,1,1").json
    assert plain != halve(*arguments, "--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225").json


def test_layers_that_never_run_are_noted(halve, predicting):
    arguments = ("predicting.py:named", "--data", "photos", "--score", "wanda", "--force")
    shown = halve("prune", *arguments).err
    assert "note: not masked, as they did not run on the data: idle; --also masks them" in shown
    assert halve("prune", *arguments, "--json").json["not_masked"]["idle"] == (
        "did not run on the data (--also idle masks it)"
    )
    assert "idle" in halve("learn", "predicting.py:named", "--data", "photos", "--steps", "1", "--out", "x").err
    assert "idle" not in halve("prune", *arguments, "--also", "idle").err
