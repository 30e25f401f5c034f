"""experiments/certify.py: what it records of networks, which records are joined, and what a probe tells of it."""

import importlib
import json
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import halve
from halve.sources.digits import DigitsResNet
from halve.sources.weights import save_state

ROOT = Path(__file__).parents[2]
CONDITIONS = {"method": "CROWN", "branches": 1000, "gap": None, "size": 2 / 255, "layers": None}
CONDITIONS |= {"image_seconds": None, "device": "CPU, 1 thread"}


@pytest.fixture
def experiment(monkeypatch):
    """A module of experiments/, by name."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module


@pytest.fixture
def records(experiment, tmp_path):
    return experiment("certify_records").Records(tmp_path / "certify.json")


def record(experiment, bounds, *images):
    run = "digits_region_2"
    found = [
        {"index": i, "agree": True, "certified": good, "bounds": {"masked": 1.0}, "seconds": 1.0} for i, good in images
    ]
    about = {"run": run, "masks": "m", "bounds": bounds} | CONDITIONS
    return about | experiment("certify_records").summary(run, found)


def test_records_of_the_same_bounds_are_joined_and_others_replaced(experiment, records, tmp_path):
    records.save(record(experiment, "new", (0, True), (3, False)))
    records.merge({"digits_region_2": record(experiment, "new", (1, True), (3, True))})
    found = records.load()["digits_region_2"]
    assert [one["index"] for one in found["per_image"]] == [0, 1, 3]
    assert (found["n"], found["share_certified"]) == (3, 1.0)
    records.merge({"digits_region_2": record(experiment, "newer", (7, False))})
    found = records.load()["digits_region_2"]
    assert (found["n"], found["share_certified"]) == (1, 0.0)
    assert len(json.loads((tmp_path / "certify.json").read_text())) == 1


def test_old_records_that_do_not_name_their_masks_replace_and_are_not_joined(experiment, records):
    old = record(experiment, "new", (1, True))
    del old["masks"]
    records.save(record(experiment, "new", (0, True)))
    records.merge({"digits_region_2": old})
    assert [one["index"] for one in records.load()["digits_region_2"]["per_image"]] == [1]


@pytest.mark.parametrize("change", [{"device": "NVIDIA H200"}, {"branches": 0}, {"gap": 0.25}, {"image_seconds": 60.0}])
def test_images_under_other_conditions_are_not_joined_and_nothing_is_lost(experiment, records, change):
    records.save(record(experiment, "new", (0, True)))
    before = records.load()
    [key] = change
    with pytest.raises(SystemExit, match=f"digits_region_2 is recorded with {key} .*--out"):
        records.merge({"digits_region_2": record(experiment, "new", (1, True)) | change})
    assert records.load() == before


def test_a_condition_that_an_old_record_does_not_state_is_unknown(experiment, records):
    old = record(experiment, "new", (0, True))
    del old["gap"]
    records.save(old)
    with pytest.raises(SystemExit, match="gap unknown, not None"):
        records.merge({"digits_region_2": record(experiment, "new", (1, True))})


def test_no_task_starts_after_the_deadline(experiment, tmp_path):
    tasks = experiment("certify_tasks")
    task = tasks.Task("digits_region_2", tmp_path, "cpu", 1.0, (0,))
    assert list(tasks.completed([task], 1, time.monotonic() - 1)) == []


@pytest.fixture
def pair(experiment):
    """A small network with masks by magnitude."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    subjects = experiment("certify_subjects")
    one = subjects.Subject(model.eval(), halve.prune(model), torch.rand(12, 1, 2, 4), (0.0,), (1.0,))
    return subjects.Pair(one, "cpu")


def test_slopes_inside_are_optimised_where_a_proof_is_near(experiment, pair):
    image, found = pair.subject.images[:1].double(), {}
    label = int(pair.models["dense"](image).argmax())
    for gap in (math.inf, 1e9, 0.0):
        run = experiment("certify_statements").Region("digits", 0.3, 6, gap=gap)
        [found[gap]] = run.bounds(pair, "dense", image, [label], [run.size])
    assert found[math.inf] == pytest.approx(found[1e9])
    assert found[0.0] < found[1e9] < 0


def test_agreement_is_recorded_with_what_is_proven_apart_together_and_by_an_attack(experiment, pair):
    totals = []
    for size in (1e-4, 0.1, 1.0):
        run = experiment("certify_statements").JointAgreement("digits", size, 12)
        found = run.prove(pair, pair.subject.images.double())
        for outcome in found:
            assert not outcome["agree"] or (outcome["lead"] == 0) == outcome["joint"]
        total = run.summary(found)
        assert total["keeps"] + total["only_joint"] + total["open"] == total["n"] > 0
        totals.append(total)
    assert [total["keeps"] for total in totals] == sorted((total["keeps"] for total in totals), reverse=True)
    assert totals[0]["open"] == totals[0]["differ"] == 0
    assert totals[0]["lead"] is None
    assert totals[2]["differ"] > 0
    assert totals[2]["lead"] > 0


def test_certified_changes_of_pixels_and_of_weights_are_not_attacked_successfully(experiment, pair):
    statements = experiment("certify_statements")
    for run in (
        statements.Region("digits", 0.01, 6),
        statements.Region("digits", None, 6),
        statements.Reuse("digits", 1e-3, 6),
        statements.Reuse("digits", None, 6),
    ):
        images = pair.subject.images[:4].double()
        found = run.prove(pair, images)
        found = [one | (run.attack(pair, x, one) if one["agree"] else {}) for x, one in zip(images, found, strict=True)]
        total = run.summary(found)
        assert total["attacks"] == total["n"] > 0
        if run.size is None:
            assert 0 < total["median_radius"] <= total["median_attack_radius"]
        else:
            assert total["tightness"] >= 1


@pytest.fixture
def subjects(tmp_path):
    """The folder of a network that was not trained, with magnitude masks and random images."""
    torch.manual_seed(0)
    model = DigitsResNet().eval()
    save_state(model.state_dict(), tmp_path / "digits.safetensors")
    masks = halve.prune(model)
    masks.save(tmp_path / "digits.masks.safetensors")
    images = torch.rand(400, 1, 8, 8) * 2 - 1
    with torch.no_grad():
        differ = model(images).argmax(1) != halve.apply(model, masks)(images).argmax(1)
    assert differ.sum() > 1
    save_file({"images": images[~differ][:20]}, tmp_path / "digits.images")
    save_file({"images": images[differ][:2]}, tmp_path / "differ.images")
    return tmp_path


def certified(experiment, monkeypatch, subjects, *options):
    """The records after a run of the command."""
    out = subjects / "certify.json"
    monkeypatch.setattr("sys.argv", ["certify.py", str(subjects), "--out", str(out), *map(str, options)])
    experiment("certify").main()
    return {one["run"]: one for one in json.loads(out.read_text())}


@pytest.mark.parametrize("run", ["digits_region_2", "digits_agreement", "digits_agreement_0.001"])
def test_a_run_is_recorded_before_any_image_agrees(experiment, subjects, monkeypatch, run):
    (subjects / "differ.images").rename(subjects / "digits.images")
    for _ in range(2):  # it can be started again
        found = certified(experiment, monkeypatch, subjects, "--run", run)[run]
        assert found["n"] == 0
        assert [one["agree"] for one in found["per_image"]] == [False, False]


def test_a_run_continues_under_the_same_conditions_only(experiment, subjects, monkeypatch):
    run, out = "digits_intervals_0.25", subjects / "certify.json"
    [found] = certified(experiment, monkeypatch, subjects, "--run", run).values()
    assert found["n"] == 20
    found["per_image"] = found["per_image"][:3]
    out.write_text(json.dumps([found]))
    with pytest.raises(SystemExit, match=r"image_seconds None, not 9\.0"):
        certified(experiment, monkeypatch, subjects, "--run", run, "--image-seconds", 9)
    assert json.loads(out.read_text()) == [found]
    [again] = certified(experiment, monkeypatch, subjects, "--run", run).values()
    assert again["n"] == 20
    assert again["per_image"][:3] == found["per_image"]
    attacked = certified(experiment, monkeypatch, subjects, "--run", run, "--attack", "--image-seconds", 9)[run]
    assert (attacked["attacks"], attacked["image_seconds"]) == (20, None)


@pytest.mark.parametrize("run", ["digits_agreement", "digits_agreement_0.001", "digits_lemmas", "resnet20_flips"])
def test_only_proofs_of_regions_and_updates_are_attacked_afterwards(experiment, subjects, monkeypatch, capsys, run):
    with pytest.raises(SystemExit):
        certified(experiment, monkeypatch, subjects, "--run", run, "--attack")
    said = capsys.readouterr().err
    assert f"--attack takes runs that prove regions or updates (digits_region_2, ...), not {run}" in said


def test_the_probe_reports_each_step(experiment, subjects, monkeypatch, capsys):
    probe, out = experiment("certify_probe"), subjects / "out.jsonl"
    options = ["--items", "digits", "--device", "cpu", "--no-inside", "--limit", "100", "--profile", "digits"]
    monkeypatch.setattr("sys.argv", ["certify_probe.py", str(subjects), *options, "--out", str(out)])
    probe.main()
    found = json.loads(out.read_text())
    assert "failed" not in found
    assert found["intervals"] <= found["plain"] <= found["last"] + 1e-9 <= found["margin"] + 1e-9
    assert all(after <= before for before, after in zip(found["open_before"], found["open"], strict=True))
    assert "aten::" in capsys.readouterr().out
    bounds = probe.Probe("digits", "digits_region_2", subjects, "cpu", 100.0).everything(False)
    assert max(probe.difference("digits_region_2", subjects, bounds).values()) < 1e-12
