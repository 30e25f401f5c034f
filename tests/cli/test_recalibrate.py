import pytest
import torch
from torch.utils.data import default_collate

import halve as package
from halve.sources.data import load_data
from halve.sources.models import load_model
from tests.untouched import same_bits


def test_recalibrate_writes_the_masks_with_statistics_to_a_new_file(halve, net, masks, folder):
    before = (folder / masks).read_bytes()
    result = halve("recalibrate", *net, "--masks", masks, "--data", "photos", "--batch", "12")
    assert result.out == "net.recalibrated.masks.safetensors: statistics of 1 BatchNorm layer from 12 images\n"
    assert result.err == ""
    assert (folder / masks).read_bytes() == before

    written = package.load(folder / "net.recalibrated.masks.safetensors")
    model = load_model("zoo.py:net", "net.safetensors").model
    images = default_collate([image for image, _ in load_data("photos", batch_size=1).loader])
    wanted = package.recalibrate(model, package.load(folder / masks), images.flatten(0, 1))
    assert written == wanted
    assert sorted(written.statistics) == ["bn.running_mean", "bn.running_var"]
    for name, value in written.statistics.items():
        torch.testing.assert_close(value, wanted.statistics[name])


def test_the_statistics_reach_the_applied_checkpoint(halve, net, masks, folder):
    halve("recalibrate", *net, "--masks", masks, "--data", "photos", "--out", "new.masks.safetensors")
    halve("apply", *net, "--masks", "new.masks.safetensors", "--out", "sparse.safetensors")
    model = load_model("zoo.py:net", "sparse.safetensors").model
    statistics = package.load(folder / "new.masks.safetensors").statistics
    assert same_bits(model.bn.running_var, statistics["bn.running_var"])


def test_recalibrate_as_json_says_what_it_measured(halve, net, masks):
    shown = halve("recalibrate", *net, "--masks", masks, "--data", "photos", "--images", "5", "--json").json
    assert shown["file"] == "net.recalibrated.masks.safetensors"
    assert (shown["norms"], shown["images"], shown["layers"]) == (1, 5, 2)


@pytest.mark.parametrize("what", ["--masks", "--data"])
def test_what_is_needed_is_named(halve, net, masks, what):
    given = {"--masks": masks, "--data": "photos"}
    del given[what]
    assert what in halve("recalibrate", *net, *(part for pair in given.items() for part in pair), code=2).err
