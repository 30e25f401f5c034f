import pytest
import torch

import halve as package
from halve.cli.compile import show_plan
from halve.cli.show import formatted_bytes
from halve.engine import compiled
from halve.engine.plan import Entry
from halve.sources.models import load_model
from tests.engine.timers import use_timer

QUICK = ("--size", "16", "--out", "net.compiled.safetensors")


@pytest.mark.filterwarnings("always:running dense")
def test_a_compiled_network_is_written_and_can_be_read(halve, net, masks, folder):
    result = halve("compile", *net, "--masks", masks, *QUICK, "--batch", "2", "--batch", "3")
    assert "net.compiled.safetensors: " in result.out
    assert "running dense: our CPU kernels need AVX-512" in result.err
    fast = package.load_compiled(folder / "net.compiled.safetensors")
    x = torch.randn(3, *fast.example[0].shape[1:])
    model = load_model("zoo.py:net", folder / net[-1]).model
    expected = package.apply(model, package.load(folder / masks))(x)
    torch.testing.assert_close(fast(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("always:running dense")
def test_a_network_without_masks_is_said_to_keep_all_weights(halve, net, masks):
    assert "no masks: all weights kept" in halve("compile", *net, *QUICK).out.splitlines()
    assert "no masks" not in halve("compile", *net, *QUICK, "--masks", masks).out


@pytest.mark.filterwarnings("always:running dense")
def test_other_image_sizes_are_taken_when_asked_for(halve, net, masks, folder):
    halve("compile", *net, "--masks", masks, *QUICK, "--any-size")
    assert package.load_compiled(folder / "net.compiled.safetensors")(torch.randn(2, 3, 24, 16)).shape[0] == 2
    halve("compile", *net, "--masks", masks, *QUICK)
    with pytest.raises(package.HalveError, match="any_size=True"):
        package.load_compiled(folder / "net.compiled.safetensors")(torch.randn(2, 3, 24, 16))


@pytest.mark.filterwarnings("always:running dense")
def test_json_has_the_file_and_the_plan(halve, net, masks, folder):
    told = halve("compile", *net, "--masks", masks, *QUICK, "--dtype", "bfloat16", "--json").json
    assert told["file"] == "net.compiled.safetensors"
    assert told["bytes"] == (folder / "net.compiled.safetensors").stat().st_size
    assert "AVX-512" in told["plan"]["dense"]
    assert package.load_compiled(folder / "net.compiled.safetensors").dtype == torch.bfloat16


@pytest.mark.cpu_kernels
def test_the_size_of_the_machine_code_is_told(halve, net, masks, monkeypatch):
    sparse = {"cpu_sp": 0.0, "above": 1.0}
    use_timer(monkeypatch, lambda calls, device: {one: sparse.get(one.split()[0], 2.0) for one in calls})
    monkeypatch.setattr(compiled, "unavailable", lambda device: "not tried here")
    given = ("compile", *net, "--masks", masks, *QUICK)
    told = halve(*given, "--json").json
    assert told["code_bytes"] > 0
    assert f"machine code: {formatted_bytes(told['code_bytes'])}" in halve(*given, "--force").out


def test_bad_options_are_refused_before_anything_is_compiled(halve, net, masks):
    given = ("compile", *net, "--masks", masks)
    assert "must be one of float32, float16, bfloat16, got int8" in halve(*given, *QUICK, "--dtype", "int8", code=2).err
    assert "cannot write" in halve(*given, "--out", "nowhere/net.compiled.safetensors", code=2).err
    assert "--batch" in halve(*given, *QUICK, "--batch", "0", code=2).err


def test_a_plan_is_a_table(capsys):
    show_plan(8, [Entry("conv1", "4>8 3x3 at 8", "mma_sp 64x64", True, 0.1, 0.2, 0.15, 0.1, "fastest")])
    shown = capsys.readouterr().out
    assert "batch 8: 1 of 1 layers sparse" in shown
    assert "mma_sp 64x64" in shown
