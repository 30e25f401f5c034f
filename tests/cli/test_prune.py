import pytest
import torch

import halve as package
from halve.sources.models import load_model


@pytest.mark.parametrize("score", ["magnitude", "wanda", "random"])
def test_prune_writes_what_the_library_would_beside_the_checkpoint(halve, net, folder, score):
    result = halve("prune", *net, "--score", score, "--data", "photos", "--batch", "12")
    assert result.out.startswith("net.masks.safetensors: 2 layers, 1,408 weights, 50.0 % kept, ")
    made = package.load(folder / "net.masks.safetensors")
    assert made.recipe["score"] == score
    assert (made.recipe["source"], made.recipe["weights"]) == ("zoo.py:net", "net.safetensors")
    if score != "wanda":
        assert made == package.prune(load_model("zoo.py:net").model, score)


def test_prune_measures_the_images_that_it_says(halve, net, folder):
    halve("prune", *net, "--score", "wanda", "--data", "photos", "--images", "5", "--recalibrate")
    made = package.load(folder / "net.masks.safetensors")
    assert made.recipe["images"] == made.recipe["recalibrated_on_images"] == 5
    assert made.recipe["data"] == "photos"
    assert set(made.statistics) == {"bn.running_mean", "bn.running_var"}


def test_prune_gives_the_same_masks_again(halve, net):
    options = ("--score", "wanda", "--data", "photos", "--recalibrate", "--images", "8", "--batch", "4")
    halve("prune", *net, *options, "--out", "one.masks.safetensors")
    halve("prune", *net, *options, "--out", "two.masks.safetensors")
    assert package.load("one.masks.safetensors") == package.load("two.masks.safetensors")


def test_prune_does_not_touch_the_checkpoint(halve, net, folder):
    before = (folder / "net.safetensors").read_bytes()
    halve("prune", *net)
    assert (folder / "net.safetensors").read_bytes() == before


def test_prune_as_json_names_the_file_and_nothing_else_is_on_standard_output(halve, net):
    result = halve("prune", *net, "--json", "--out", "x.masks.safetensors")
    about = result.json
    reasons = about.pop("not_masked")
    assert list(reasons) == ["stem", "depthwise", "head"]
    assert reasons["head"] == "output head (--also head masks it)"
    assert about == {"file": "x.masks.safetensors", "layers": 2, "weights": 1408, "density": 0.5}


def test_a_missing_option_is_noticed_before_the_model_is_built(halve, folder):
    assert "--score wanda needs images: pass --data" in halve("prune", "nothing.py:x", "--score", "wanda", code=2).err
    assert "--recalibrate needs images: pass --data" in halve("prune", "nothing.py:x", "--recalibrate", code=2).err


def test_an_output_that_cannot_be_written_is_noticed_before_the_work(halve, net):
    result = halve(
        "prune", *net, "--score", "wanda", "--data", "photos", "--out", "nothing/x.masks.safetensors", code=2
    )
    assert "activations" not in result.err


def test_a_model_without_batchnorm_cannot_be_recalibrated_and_nothing_is_written(halve, folder):
    result = halve("prune", "zoo.py:plain", "--also", "*", "--data", "photos", "--recalibrate", code=2)
    assert "no BatchNorm" in result.err
    assert not list(folder.glob("*.masks.safetensors"))


def test_prune_permutes_with_and_without_images_and_says_what_it_gained(halve, net, folder):
    result = halve("prune", *net, "--permute")
    assert "channel orders for 2 layers: share of the score that is kept " in result.out
    masks = package.load(folder / "net.masks.safetensors")
    assert masks["body"].layout.channel_order is not None
    assert masks["point"].layout.channel_order is not None
    told = halve("prune", *net, "--permute", "--score", "wanda", "--data", "photos", "--json").json
    assert told["permute"]["layers"] == 2


@pytest.mark.filterwarnings("always:.*keeps the checkpoint")
def test_a_permuted_checkpoint_is_legal_as_it_lies_and_computes_the_same(halve, net, folder):
    halve("prune", *net, "--permute")
    masks = ("--masks", "net.masks.safetensors")
    plain = halve("apply", *net, *masks, "--no-permute", "--out", "plain.safetensors")
    assert "no hardware can use them" in plain.err
    halve("apply", *net, *masks, "--out", "moved.safetensors")
    halve("verify", net[0], "--weights", "moved.safetensors")
    halve("verify", net[0], "--weights", "plain.safetensors", code=1)
    halve("verify", net[0], "--weights", "moved.safetensors", *masks)
    nets = [load_model(str(folder / "zoo.py:net"), folder / f"{name}.safetensors").model for name in ("plain", "moved")]
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(nets[0](images), nets[1](images), rtol=1e-4, atol=1e-5)
    assert "moves the channels of" in halve("inspect", "net.masks.safetensors").out


def test_layers_whose_order_stays_are_named_with_the_reason(halve, net):
    result = halve("prune", *net, "--permute", "--remainder", "pad")
    assert "1 layer keeps its order" in result.err
    assert "stem: input of the model" in result.err
