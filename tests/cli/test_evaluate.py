import shutil

import pytest
from safetensors.torch import load_file

from halve.sources.weights import save_state

KEYS = {"images", "outputs", "top1", "top5", "agreement", "kl", "dense_top1", "dense_top5"}


def test_evaluate_counts_the_dense_model(halve, net):
    result = halve("evaluate", *net, "--data", "photos")
    assert result.out.splitlines()[0] == "zoo.py:net on photos, 12 images"
    assert "model" in result.out
    assert "images" in result.err
    numbers = halve("evaluate", *net, "--data", "photos", "--json").json
    assert set(numbers) == KEYS
    assert numbers["images"] == 12
    assert 0 <= numbers["top1"] <= numbers["top5"] <= 1
    assert numbers["agreement"] is numbers["kl"] is numbers["dense_top1"] is None


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
