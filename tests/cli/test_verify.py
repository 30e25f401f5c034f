from safetensors.torch import load_file

from halve.sources.weights import save_state


def test_verify_passes_for_masks_and_the_weights_they_were_made_for(halve, net, masks):
    result = halve("verify", *net, "--masks", masks)
    assert result.err == ""
    assert result.out.splitlines()[-1] == "2 of 2 layers ok"
    assert "legal" in result.out
    assert "8 input channels, not divisible by 16" in result.out


def test_verify_fails_with_1_for_weights_that_changed(halve, net, masks, folder):
    state = load_file(folder / "net.safetensors")
    state["body.weight"] = state["body.weight"] * 1.1
    save_state(state, folder / "changed.safetensors")
    result = halve("verify", "zoo.py:net", "--weights", "changed.safetensors", "--masks", masks, code=1)
    assert "error: body: its weight changed by about" in result.err
    assert result.out.splitlines()[-1] == "1 of 2 layers ok"


def test_verify_without_masks_checks_the_weights_themselves(halve, net, masks):
    result = halve("verify", *net, code=1)
    assert "0 of 2 layers ok" in result.out
    assert "100 % of its blocks keep more than 2:4" in result.err
    halve("apply", *net, "--masks", masks, "--out", "sparse.safetensors")
    assert "2 of 2 layers ok" in halve("verify", "zoo.py:net", "--weights", "sparse.safetensors").out
    assert (
        "1 of 1 layers ok"
        in halve("verify", "zoo.py:net", "--weights", "sparse.safetensors", "--include", "body", "--pattern", "2:4").out
    )


def test_verify_with_nothing_to_check_fails(halve, net):
    result = halve("verify", *net, "--exclude", "*", code=1)
    assert "error: no layer to check" in result.err


def test_verify_as_json_prints_json_alone_also_when_it_fails(halve, net, masks):
    good = halve("verify", *net, "--masks", masks, "--json")
    assert set(good.json) == {"ok", "failures", "layers"}
    assert good.json["ok"] is True
    assert good.json["failures"] == {}
    assert [layer["name"] for layer in good.json["layers"]] == ["body", "point"]
    assert set(good.json["layers"][0]) >= {"name", "pattern", "legal", "state", "not_tensorrt", "not_tensor_cores"}
    bad = halve("verify", *net, "--json", code=1)
    assert bad.json["ok"] is False
    assert set(bad.json["failures"]) == {"body", "point"}


def test_verify_refuses_options_that_it_would_not_use(halve, net, masks):
    result = halve("verify", *net, "--masks", masks, "--include", "body", code=2)
    assert "error:" in result.err
