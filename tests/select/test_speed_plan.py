import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn

import halve
from halve.errors import FileError, ModelError, OptionError, SpeedWarning
from halve.machine import device_names
from halve.select.speed_plan import LayerSpeed, SpeedPlan, load_plan
from tests.untouched import untouched


def net():
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 4))


def plan(first=(1.0, 0.5), second=(1.0, 1.1), device=None, **others):
    layers = {
        "1": LayerSpeed((8, 8, 3, 3), "8>8 3x3", *first),
        "2": LayerSpeed((8, 8, 1, 1), "8>8 1x1", *second),
    }
    found = SpeedPlan(layers, device or device_names()[-1], "float32", 8, (3, 8, 8), 5.0, 4.0, 3.0, {"torch": "2"})
    return dataclasses.replace(found, **others)


def test_only_layers_that_are_faster_sparse_are_masked():
    model = net()
    with untouched(model):
        chosen = halve.select(model, plan=plan())
    assert [choice.name for choice in chosen.masked] == ["1"]
    assert "not faster sparse: 1.1000 ms, dense 1.0000 ms" in chosen.not_masked["2"]
    assert list(halve.prune(model, plan=plan())) == ["1"]


def test_a_gain_within_the_noise_is_none():
    assert not LayerSpeed((4, 4), "", 1.0, 0.99).faster
    assert LayerSpeed((4, 4), "", 1.0, 0.97).faster


def resnet_like(last=0.020):
    """Small layers that save much, and large ones of which each saves little."""
    layers = {f"small.{i}": LayerSpeed((64, 64, 3, 3), "", 0.2, 0.1) for i in range(4)}
    layers |= {f"large.{i}": LayerSpeed((2048, 512, 1, 1), "", 0.1, 0.1 - last / 2) for i in range(2)}
    layers["slower"] = LayerSpeed((64, 64, 1, 1), "", 0.1, 0.2)
    return SpeedPlan(layers, device_names()[-1], "float32", 8, (3, 8, 8), 5.0, 4.0, 3.0)


def test_many_weights_that_save_little_stay_dense():
    found = resnet_like()
    assert found.faster == [f"small.{i}" for i in range(4)] + ["large.0", "large.1"]
    assert found.paying == [f"small.{i}" for i in range(4)]
    assert found.why_not("large.0").startswith("saves too little for its weights: 0.0900 ms, dense 0.1000 ms on")
    assert found.why_not("slower").startswith("not faster sparse")
    assert found.why_not("small.0") is None
    assert found.ms(found.faster) == 3.0
    assert found.ms(found.paying) == pytest.approx(4 - 0.4 / 0.42, abs=1e-6)
    assert found.reason("large.0") == "saves too little for its weights"
    assert str(found).splitlines()[-2].split(" | ")[-1].strip() == "no: saves too little for its weights"


def test_layers_that_save_more_than_the_last_part_are_masked():
    assert len(resnet_like(0.08).paying) == 6


def test_layers_that_save_equally_much_for_their_weights_get_the_same_verdict():
    assert len(resnet_like(0.04).paying) == 6  # one of the large layers would fit into 5 %, two do not
    layers = dict(resnet_like(0.04).layers)
    half = LayerSpeed((2048, 256, 1, 1), "", 0.1, 0.09)  # saves half as much, with half the weights
    assert len(dataclasses.replace(resnet_like(), layers=layers | {"large.1": half}).paying) == 6
    least = LayerSpeed((2048, 512, 1, 1), "", 0.1, 0.095)
    assert "large.1" not in dataclasses.replace(resnet_like(), layers=layers | {"large.1": least}).paying


def test_layers_that_are_all_alike_are_all_masked():
    layers = {str(i): LayerSpeed((64, 64, 3, 3), "", 0.2, 0.1) for i in range(40)}
    alike = dataclasses.replace(resnet_like(), layers=layers)
    assert alike.paying == list(layers)
    assert dataclasses.replace(alike, layers={}).paying == []


@pytest.mark.parametrize(
    ("times", "reason"), [((1.0, None), "no sparse kernel"), ((None, 1.0), "no sparse kernel")], ids=["sparse", "dense"]
)
def test_layers_without_times_stay_dense(times, reason):
    assert reason in halve.select(net(), plan=plan(second=times)).not_masked["2"]


def test_a_layer_that_is_not_in_the_plan_stays_dense():
    one = plan()
    only = dataclasses.replace(one, layers={"1": one["1"]})
    assert "not timed" in halve.select(net(), plan=only).not_masked["2"]


def test_naming_a_layer_masks_it_in_any_case():
    assert [choice.name for choice in halve.select(net(), plan=plan(), also="2").masked] == ["1", "2"]


def test_nothing_that_pays_is_an_error_with_the_reasons():
    with pytest.raises(ModelError, match=r"no layer to mask.*not faster sparse"):
        halve.prune(net(), plan=plan(first=(1.0, 1.0)))


def test_other_patterns_have_no_sparse_kernels():
    chosen = halve.select(net(), {"1": "1:4", "2": "2:4"}, plan=plan(second=(1.0, 0.5)))
    assert [choice.name for choice in chosen.masked] == ["2"]
    assert "1:4 has no sparse kernel" in chosen.not_masked["1"]
    with pytest.raises(OptionError, match="plan= needs order='channels', got 'flat'"):
        halve.select(net(), plan=plan(), order="flat")


def test_a_plan_of_another_machine_is_refused_unless_it_is_the_target():
    foreign = plan(device="NVIDIA H200")
    with pytest.raises(OptionError, match=r"measured on NVIDIA H200, this machine has .*target='NVIDIA H200'"):
        halve.select(net(), plan=foreign)
    assert len(halve.select(net(), plan=foreign, target="h200").masked) == 1
    with pytest.raises(OptionError, match="not on the target 'A100'"):
        halve.select(net(), plan=foreign, target="A100")
    other_threads = plan(device=device_names()[-1].replace(" threads", "0 threads"))
    assert len(halve.select(net(), plan=other_threads).masked) == 1


@pytest.mark.parametrize("given", [{}, 1.5, b"plan.json"], ids=str)
def test_what_is_no_plan_is_refused(given):
    with pytest.raises(OptionError, match=r"plan must be what halve.measure returned, or the file .*; got \w+"):
        halve.select(net(), plan=given)


def test_a_plan_of_another_network_is_refused():
    with pytest.raises(OptionError, match=r"layer 1 has a weight of shape \(8, 8, 1, 1\), in the plan \(8, 8, 3, 3\)"):
        halve.select(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)), plan=plan())
    with pytest.raises(OptionError, match="this one has no layer 2"):
        halve.select(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)), plan=plan())


def test_times_of_networks_lie_between_dense_and_sparse():
    both = plan(second=(1.0, 0.75))
    assert [both.ms(names) for names in ((), ("1",), ("2",), ("1", "2"))] == pytest.approx([4, 4 - 2 / 3, 4 - 1 / 3, 3])
    assert both.speedup(["1", "2"]) == pytest.approx(5 / 3)
    assert plan(first=(1.0, 1.0)).ms(["1"]) == 4.0


def test_a_plan_survives_its_file(tmp_path):
    one, path = plan(second=(None, None)), tmp_path / "plan.json"
    one.save(path)
    assert load_plan(path) == one
    assert [choice.name for choice in halve.select(net(), plan=path).masked] == ["1"]
    one.save(path)  # over an older plan


def test_other_files_are_not_overwritten(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{}")
    with pytest.raises(FileError, match=r"not a plan of 'halve measure'.*force=True"):
        plan().save(path)
    assert path.read_text() == "{}"
    plan().save(path, force=True)
    assert load_plan(path) == plan()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("format", "other"), ("layers", []), ("layers", {"1": {}}), ("layers", {"\x1b[31m": {}})),
        ("layers", {"1": {"weight": [16, 0], "shape": "", "dense_ms": 1.0, "sparse_ms": 0.5}}),
        *(
            ("device", "\x1b[2J"),
            ("device", 3),
            ("batch", "many"),
            ("image", 7),
            ("dense_ms", -1),
            ("unmasked_ms", None),
        ),
        *(("sparse_ms", float("nan")), ("sparse_ms", 1e400), ("versions", None), ("batch", float("inf"))),
    ],
)
def test_damaged_plans_are_refused(tmp_path, key, value):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan().as_json() | {key: value}))
    with pytest.raises(FileError, match="not a plan of 'halve measure'") as raised:
        load_plan(path)
    assert str(raised.value).isprintable()


def test_a_plan_of_another_version_is_refused_and_may_be_replaced(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan().as_json() | {"version": 1}))
    with pytest.raises(FileError, match=r"version 1, and this halve reads version 2: measure again"):
        load_plan(path)
    plan().save(path)
    assert load_plan(path) == plan()


@pytest.mark.parametrize("text", ["", "[" * 100_000, "\xff", "null"], ids=["empty", "deep", "bytes", "null"])
def test_files_that_are_no_plans_are_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(FileError, match="not a plan"):
        load_plan(path)
    with pytest.raises(FileError, match="cannot read"):
        load_plan(tmp_path / "none.json")


def test_masks_name_the_plan_they_were_made_for(tmp_path):
    model, one, path = net(), plan(), tmp_path / "plan.json"
    one.save(path)
    for given in (one, path, str(path)):
        assert halve.prune(model, plan=given).recipe["selection"]["plan"] == one.description
    assert one.description != plan(second=(1.0, 1.2)).description
    learned = halve.learn(model, torch.zeros(4, 3, 3, 3), steps=1, plan=one, validation=False, progress=False)
    assert list(learned) == ["1"]


def test_a_plan_prints_as_a_table():
    assert str(plan()).splitlines()[1:] == [
        "layer | shape   | dense ms | sparse ms | mask pays",
        "1     | 8>8 3x3 | 1.0000   | 0.5000    | yes",
        "2     | 8>8 1x1 | 1.0000   | 1.1000    | no: not faster sparse",
    ]


def test_what_masks_save_is_told_from_what_needs_no_masks():
    fused = plan(dense_ms=10.0, unmasked_ms=4.0, sparse_ms=3.99)
    assert (fused.pays, fused.speedup(())) == (False, 2.5)
    assert "masks save 0.2 % of the time: not worth masking here" in str(fused)
    with pytest.warns(SpeedWarning, match=r"float32, batch 8: masks save 0.2 % .*without masks takes 4.000 ms"):
        halve.select(net(), plan=fused)
    assert plan().pays
    slower = plan(unmasked_ms=4.0, sparse_ms=4.5)
    assert slower.saved == 0.0
    assert slower.verdict.startswith("masks make the network 12.5 % slower: not worth masking here")
    assert plan(second=(1.0, 1.2), first=(1.0, 1.2)).verdict.startswith("no layer is faster sparse: ")


def test_the_first_process_alone_warns_of_masks_that_save_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        halve.select(net(), plan=plan(sparse_ms=3.99))


def test_a_speed_that_needs_no_masks_is_refused_before_anything_is_learned():
    with pytest.raises(OptionError, match=r"min_speedup=1.2 needs no masks: compiled without them .* 1.25 x as fast"):
        halve.learn(net(), torch.zeros(64, 3, 8, 8), plan=plan(), min_speedup=1.2, steps=1)
