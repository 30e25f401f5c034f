import pytest
import torch
from safetensors.torch import load_file

import halve as package
from halve.sources.weights import save_state


@pytest.fixture
def sparse(halve, net, masks):
    halve("apply", *net, "--masks", masks, "--out", "sparse.safetensors")
    return ("zoo.py:net", "--weights", "sparse.safetensors")


def change(folder, name, factor=1.0, source="sparse.safetensors", out="changed.safetensors"):
    state = load_file(folder / source)
    state[name] = state[name] * factor
    save_state(state, folder / out)
    return ("zoo.py:net", "--weights", out)


def test_verify_passes_for_what_apply_wrote(halve, sparse, masks):
    result = halve("verify", *sparse, "--masks", masks)
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[-3:] == [
        "other tensors: 12 unchanged",
        "ok: 2 layers N:M in place, all tensors unchanged",
        f"next: halve compile zoo.py:net --weights sparse.safetensors --masks {masks} "
        "--out sparse.compiled.safetensors",
    ]
    assert "8 input channels, not divisible by 16" in result.out


def test_a_dense_checkpoint_fits_and_has_an_exit_code_of_its_own(halve, net, masks):
    result = halve("verify", *net, "--masks", masks, code=3)
    assert "not applied: the masks of 2 layers fit the model, but are not applied to it" in result.out
    assert result.out.splitlines()[-1] == (
        f"next: halve apply zoo.py:net --weights net.safetensors --masks {masks} --out net.sparse.safetensors"
    )
    assert result.err == ""


def test_the_next_command_can_be_run_as_printed(halve, net, masks):
    command = halve("verify", *net, "--masks", masks, code=3).out.splitlines()[-1].removeprefix("next: halve ")
    halve(*command.split())
    halve("verify", net[0], "--weights", "net.sparse.safetensors", "--masks", masks)


def test_verify_fails_with_1_for_weights_that_changed_unless_accepted(halve, sparse, masks, folder):
    changed = change(folder, "body.weight", 1.1)
    result = halve("verify", *changed, "--masks", masks, code=1)
    assert "error: body: its weight changed by about 10 % since the mask was made" in result.err
    assert "changed: 1 of 14 checks failed" in result.out
    assert result.out.splitlines()[-1].endswith("--on-changed accept, if the update is intended")
    result = halve("verify", *changed, "--masks", masks, "--on-changed", "accept")
    assert "accepted: 1 masked weight(s) changed, by up to about 10 % (body)" in result.out
    assert result.err == ""


def test_every_other_tensor_that_changed_is_named(halve, sparse, masks, folder):
    result = halve("verify", *change(folder, "head.bias", 1.5), "--masks", masks, code=1)
    assert result.err == "error: head.bias: it changed since the masks were made\n"
    accepted = halve("verify", *change(folder, "head.bias", 1.5), "--masks", masks, "--on-changed", "accept").out
    assert "accepted: 1 other tensor(s) changed (head.bias)" in accepted


def test_a_float16_checkpoint_is_a_cast(halve, net, masks, folder):
    halve("pack", *net, "--masks", masks, "--dtype", "float16", "--out", "half.packed.safetensors")
    result = halve("verify", net[0], "--weights", "half.packed.safetensors", "--masks", masks)
    assert "cast to float16, bit for bit: body, point" in result.out
    assert "ok: 2 layers N:M in place, all tensors unchanged or cast" in result.out


def test_masks_without_digests_are_unknown_with_an_exit_code_of_its_own(halve, sparse, masks, folder):
    read = package.load(folder / masks)
    package.MaskSet(dict(read)).save(folder / "old.masks.safetensors")
    result = halve("verify", *sparse, "--masks", "old.masks.safetensors", code=4)
    assert "unknown: the masks do not say which model they were made for" in result.out


def test_verify_without_masks_checks_the_weights_themselves(halve, net, sparse):
    result = halve("verify", *net, code=1)
    assert "failed: 2 of 2 checks failed" in result.out
    assert "100 % of its blocks keep more than 2:4" in result.err
    assert "ok: 2 layers N:M in place\n" in halve("verify", *sparse).out
    assert "ok: 1 layer N:M in place\n" in halve("verify", *sparse, "--include", "body", "--pattern", "2:4").out


def test_verify_with_nothing_to_check_fails(halve, net):
    result = halve("verify", *net, "--exclude", "*", code=1)
    assert "error: no layer to check" in result.err


def test_verify_as_json_prints_json_alone_also_when_it_fails(halve, net, sparse, masks, folder):
    good = halve("verify", *sparse, "--masks", masks, "--json")
    assert set(good.json) == {
        *("ok", "status", "failures", "accepted", "casts", "unchecked", "moved", "layers", "tensors"),
    }
    assert good.json["ok"] is True
    assert good.json["failures"] == {}
    assert [layer["name"] for layer in good.json["layers"]] == ["body", "point"]
    assert set(good.json["layers"][0]) >= {"name", "pattern", "in_place", "state", "not_tensorrt", "not_tensor_cores"}
    bad = halve("verify", *net, "--json", code=1)
    assert bad.json["ok"] is False
    assert set(bad.json["failures"]) == {"body", "point"}
    half = halve("verify", *change(folder, "body.weight", torch.nan), "--masks", masks, "--json", code=1)
    assert half.json["status"] == "failed"


def test_verify_refuses_options_that_it_would_not_use(halve, net, masks):
    assert "error:" in halve("verify", *net, "--masks", masks, "--include", "body", code=2).err
    result = halve("verify", *net, "--masks", masks, "--on-changed", "ignore", code=2)
    assert "must be one of fail, accept" in result.err
    assert "--on-changed accept needs masks" in halve("verify", *net, "--on-changed", "accept", code=2).err


def test_the_help_names_the_exit_codes(halve):
    told = " ".join(halve("verify", "--help").out.split())
    assert "3 the masks fit but are not applied" in told
    assert "4 unknown" in told
