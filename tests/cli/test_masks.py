import pytest
import torch
from safetensors.torch import load_file

import halve as package
from halve.sources.models import load_model
from halve.sources.weights import save_state
from tests.untouched import same_bits


@pytest.fixture
def changed(folder):
    """A checkpoint whose weights moved a little since the masks were made."""
    state = {
        name: value * 1.01 if value.is_floating_point() else value
        for name, value in load_file(folder / "net.safetensors").items()
    }
    return str(save_state(state, folder / "changed.safetensors"))


def same_files(one, other):
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def test_apply_writes_a_checkpoint_with_zeros_of_the_same_names_and_shapes(halve, net, masks, folder):
    result = halve("apply", *net, "--masks", masks, "--out", "sparse.safetensors")
    assert result.out.startswith("sparse.safetensors: 712 of ")
    dense, sparse = load_file("net.safetensors"), load_file("sparse.safetensors")
    assert {name: value.shape for name, value in dense.items()} == {name: v.shape for name, v in sparse.items()}
    expected = package.apply(load_model("zoo.py:net").model, package.load(masks)).state_dict()
    assert all(same_bits(sparse[name], expected[name]) for name in sparse)
    assert all(same_bits(sparse[n], dense[n]) for n in dense if n not in ("body.weight", "point.weight"))


def test_apply_as_json_counts_zeros(halve, net, masks):
    result = halve("apply", *net, "--masks", masks, "--out", "sparse.safetensors", "--json").json
    assert set(result) == {"file", "zeros", "parameters"}
    assert (result["file"], result["zeros"]) == ("sparse.safetensors", 704 + 8)  # and the bias of the BatchNorm


@pytest.mark.parametrize("name", ["sparse.safetensors", "sparse.pth", "sparse"])
def test_what_apply_writes_can_be_read_again_or_is_refused(halve, net, masks, name, folder):
    try:
        halve("apply", *net, "--masks", masks, "--out", name)
    except AssertionError:
        assert not (folder / name).exists()
        return
    halve("verify", "zoo.py:net", "--weights", name)


def test_applying_twice_changes_nothing_and_warns_of_nothing(halve, net, masks):
    halve("apply", *net, "--masks", masks, "--out", "one.safetensors")
    again = halve("apply", "zoo.py:net", "--weights", "one.safetensors", "--masks", masks, "--out", "two.safetensors")
    assert again.err == ""
    assert same_files("one.safetensors", "two.safetensors")


def test_changed_weights_give_a_warning_on_standard_error_and_the_result(halve, net, masks, changed, folder):
    result = halve("apply", "zoo.py:net", "--weights", changed, "--masks", masks, "--out", "sparse.safetensors")
    assert result.err.startswith("warning: the weights of 2 masked layer(s) changed since the masks were made: ")
    assert "by about 1 %" in result.err
    assert result.err.count("warning:") == 1
    assert "warning" not in result.out
    assert (folder / "sparse.safetensors").exists()


def test_changed_weights_can_be_an_error_or_be_ignored(halve, net, masks, changed, folder):
    arguments = ("apply", "zoo.py:net", "--weights", changed, "--masks", masks, "--out", "sparse.safetensors")
    result = halve(*arguments, "--on-changed", "error", code=2)
    assert "changed since the masks were made" in result.err
    assert not (folder / "sparse.safetensors").exists()
    assert halve(*arguments, "--on-changed", "ignore").err == ""
    assert "'warn', 'error' or 'ignore'" in halve(*arguments, "--on-changed", "maybe", code=2).err


def test_masks_of_another_model_are_refused(halve, net, masks):
    result = halve("apply", "zoo.py:plain", "--masks", masks, "--out", "sparse.safetensors", code=2)
    assert "the masks are for another model" in result.err


def test_inspect_shows_a_mask_file(halve, net, masks):
    out = halve("inspect", masks).out
    assert out.splitlines()[0] == masks
    for words in (
        "body",
        "2:4",
        "16x8x3x3",
        "channels",
        "50.0 %",
        "halve.masks",
        "score: magnitude",
        "bits per weight",
    ):
        assert words in out
    assert "recalibrated" not in out


def test_inspect_shows_recalibrated_statistics(halve, net, folder):
    halve("prune", *net, "--recalibrate", "--data", "photos")
    assert "recalibrated statistics of 1 BatchNorm layer" in halve("inspect", "net.masks.safetensors").out


@pytest.mark.parametrize("kind", ["halve.masks", "halve.packed"])
def test_inspect_as_json_describes_masks_and_packed_checkpoints_alike(halve, net, masks, folder, kind):
    path = masks
    if kind == "halve.packed":
        path = "net.packed.safetensors"
        halve("pack", *net, "--masks", masks, "--out", path)
    result = halve("inspect", path, "--json").json
    keys = {"file", "format", "bytes", "weights", "density", "layers", "statistics", "corrections", "moved", "recipe"}
    assert set(result) == keys
    assert (result["format"], result["file"]) == (kind, path)
    assert result["bytes"] == (folder / path).stat().st_size
    assert (result["weights"], result["density"]) == (1408, 0.5)
    assert list(result["layers"]) == ["body", "point"]
    assert result["layers"]["body"]["pattern"] == "2:4"
    assert result["layers"]["body"]["shape"] == [16, 8, 3, 3]
    assert result["recipe"]["score"] == "magnitude"
    assert "body" in halve("inspect", path).out


def test_packing_and_unpacking_give_what_apply_gives_and_the_masks(halve, net, masks):
    halve("pack", *net, "--masks", masks, "--out", "net.packed.safetensors")
    result = halve("unpack", "net.packed.safetensors", "--out", "un.safetensors", "--masks-out", "un.masks.safetensors")
    assert "2 masked layers" in result.out
    halve("apply", *net, "--masks", masks, "--out", "sparse.safetensors")
    assert same_files("un.safetensors", "sparse.safetensors")
    assert package.load("un.masks.safetensors") == package.load(masks)


def test_pack_says_how_much_smaller_the_file_is(halve, net, masks, folder):
    arguments = ("pack", *net, "--masks", masks, "--out", "net.packed.safetensors")
    result = halve(*arguments, "--json").json
    assert set(result) == {"file", "bytes", "dense_bytes", "share"}
    assert result["bytes"] == (folder / "net.packed.safetensors").stat().st_size
    assert result["share"] == result["bytes"] / result["dense_bytes"]
    assert "of the dense" in halve(*arguments).out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pack_casts_when_asked(halve, net, masks, dtype):
    halve("pack", *net, "--masks", masks, "--out", "half.packed.safetensors", "--dtype", dtype)
    halve("unpack", "half.packed.safetensors", "--out", "un.safetensors")
    assert load_file("un.safetensors")["body.weight"].dtype == getattr(torch, dtype)


def test_pack_keeps_a_variance_that_overflows_and_says_so(halve, net, masks, folder):
    state = load_file("net.safetensors")
    state["bn.running_var"][0] = 8e4
    save_state(state, "net.safetensors")
    arguments = ("pack", *net, "--masks", masks, "--out", "half.packed.safetensors", "--dtype", "float16")
    assert "warning: bn.running_var: values overflow torch.float16" in halve(*arguments).err
    halve("unpack", "half.packed.safetensors", "--out", "un.safetensors")
    assert load_file("un.safetensors")["bn.running_var"].max() == 8e4


def test_an_unknown_dtype_lists_those_that_exist(halve, net, masks):
    result = halve("pack", *net, "--masks", masks, "--out", "x.packed.safetensors", "--dtype", "int8", code=2)
    assert "float32, float16, bfloat16" in result.err


@pytest.mark.parametrize("name", ["net.packed.safetensors", "small.safetensors"])
def test_a_packed_checkpoint_serves_as_weights_whatever_its_name(halve, net, masks, name):
    halve("pack", *net, "--masks", masks, "--out", name)
    assert "ok: 2 layers N:M in place" in halve("verify", "zoo.py:net", "--weights", name).out
    assert "all tensors unchanged" in halve("verify", "zoo.py:net", "--weights", name, "--masks", masks).out


def test_unpack_as_json_names_the_files(halve, net, masks):
    halve("pack", *net, "--masks", masks, "--out", "net.packed.safetensors")
    result = halve("unpack", "net.packed.safetensors", "--out", "un.safetensors", "--json").json
    assert result == {"files": ["un.safetensors"], "tensors": 15, "layers": 2}


def test_the_inputs_are_never_written_over_by_a_failing_command(halve, net, masks, folder):
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    halve("unpack", masks, "--out", "net.safetensors", code=2)
    halve("pack", "zoo.py:plain", "--masks", masks, "--out", "net.safetensors", code=2)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before


def test_what_a_file_says_cannot_control_the_terminal(halve, masks, folder):
    read = package.load(masks)
    hostile = package.MaskSet({"a\x1b[2J\u202e": read["body"]}, recipe={"\x1b]0;x\x07": "\x9b1m\u2066"})
    hostile.save(folder / "hostile.masks.safetensors")
    result = halve("inspect", "hostile.masks.safetensors")
    assert "\\x1b[2J\\u202e" in result.out
    assert result.out.replace("\n", "").isprintable()
