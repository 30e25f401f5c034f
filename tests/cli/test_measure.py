import json

import pytest
import torch

from halve.errors import EngineWarning
from halve.machine import device_name
from halve.select.speed_plan import LayerSpeed, SpeedPlan, load_plan


@pytest.fixture
def measured(folder):
    """A plan in which only the layer `body` is faster sparse."""
    layers = {"body": LayerSpeed((16, 8, 3, 3), "", 1.0, 0.5), "point": LayerSpeed((16, 16, 1, 1), "", 1.0, 1.0)}
    plan = SpeedPlan(layers, "NVIDIA H200", "float16", 256, (3, 8, 8), 2.0, 1.8, 1.5)
    plan.save(folder / "h200.json")
    return plan


@pytest.mark.filterwarnings(f"ignore::{EngineWarning.__module__}.{EngineWarning.__name__}")
def test_a_plan_is_measured_saved_and_shown(halve, folder):
    result = halve(
        *(
            "measure",
            "zoo.py:net",
            "--size",
            16,
            "--batch",
            2,
            "--seconds",
            0.01,
            "--out",
            "plan.json",
            "--device",
            "cpu",
        )
    )
    plan = load_plan(folder / "plan.json")
    assert (plan.batch, plan.image, plan.device) == (2, (3, 16, 16), device_name(torch.device("cpu")))
    assert list(plan) == ["body", "point"]
    assert f"masks pay in {len(plan.paying)} of 2 layers" in result.out
    for name in plan:
        [row] = [line for line in result.out.splitlines() if line.startswith(name)]
        assert row.rstrip().endswith(plan.answer(name))
    assert "CUDA" not in result.err
    again = halve(
        "measure", "zoo.py:net", "--size", 16, "--batch", 1, "--seconds", 0.01, "--out", "plan.json", "--json"
    )
    assert again.json["batch"] == 1


def test_a_plan_does_not_replace_other_files(halve, folder):
    (folder / "notes.json").write_text("{}")
    for name in ("zoo.py", "notes.json"):
        result = halve("measure", "zoo.py:net", "--out", name, code=2)
        assert "cannot write" in result.err
    assert json.loads((folder / "notes.json").read_text()) == {}


def test_commands_mask_only_where_it_pays(halve, folder, measured):
    options = ("zoo.py:net", "--plan", "h200.json", "--target", "H200")
    chosen = halve("select", *options, "--json").json
    assert {one["layer"] for one in chosen if one["masked"]} == {"body"}
    assert halve("prune", *options, "--json").json["layers"] == 1
    learned = halve(
        "learn", *options, "--data", "photos", "--steps", 1, "--size", 8, "--json", "--out", "new.safetensors"
    )
    assert learned.json["layers"] == 1


def test_a_plan_of_another_machine_needs_a_target(halve, folder, measured):
    result = halve("prune", "zoo.py:net", "--plan", "h200.json", code=2)
    assert "measured on NVIDIA H200" in result.err
    assert "--target" in result.err
    result = halve("prune", "zoo.py:net", "--plan", "h200.json", "--out", "h200.json", "--target", "H200", code=2)
    assert "same file as --plan" in result.err
