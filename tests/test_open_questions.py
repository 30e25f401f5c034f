"""The studies of what the paper leaves open, on networks that take no time."""

import importlib
import json
import xml.dom.minidom
from pathlib import Path

import pytest
import torch
from torch import nn

import halve
from halve.learn.sampling import Sampler
from halve.sources.digits import DigitsResNet
from halve.sources.small_resnet import SmallResNet

ROOT = Path(__file__).parent.parent


@pytest.fixture
def experiment(monkeypatch):
    """A module of experiments/, by name."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module


@pytest.fixture
def questions(experiment):
    return experiment("open_questions")


@pytest.fixture
def small(questions):
    """A network that was not trained, with 40 images of 10 classes to learn from and 20 to measure on."""
    torch.manual_seed(0)
    train, rest = (
        questions.Pictures(255 * torch.rand(n, 1, 8, 8), torch.arange(n) % 10, questions.DIGITS._replace(batch=16))
        for n in (40, 20)
    )
    return questions.Subject("digits", SmallResNet(10, 4).eval(), train, rest)


def test_digits_are_those_that_the_network_was_trained_on_and_others(questions, monkeypatch):
    monkeypatch.setattr(questions, "train_digits", lambda: nn.Identity())
    subject = questions.subject("digits", None, "cpu", None, 500)
    images, labels = questions.digits("test").tensors
    assert torch.equal(torch.cat([batch for batch, _ in subject.rest]), images)
    assert torch.equal(subject.rest.labels, labels)
    assert len(subject.train.labels) == 1297
    assert not {x.numpy().tobytes() for x in subject.train.pixels} & {x.numpy().tobytes() for x in subject.rest.pixels}


def test_held_back_images_are_not_learned_from(questions, monkeypatch):
    everything = questions.Pictures(torch.arange(90.0).reshape(-1, 1, 1, 1), torch.arange(90) % 3, questions.DIGITS)
    monkeypatch.setattr(questions, "load", lambda *args: everything)
    network = questions.SUBJECTS["cifar_resnet20"]
    monkeypatch.setattr(type(network), "model", lambda *args: nn.Identity())
    subject = questions.subject("cifar_resnet20", Path(), "cpu", None, 5)
    learned, measured = (set(part.pixels.flatten().tolist()) for part in (subject.train, subject.rest))
    assert len(learned) == 81
    assert len(measured) == 5
    assert not learned & measured


def test_the_default_is_an_arm_of_every_study_of_settings(questions):
    for study in ("temperature", "objective", "data", "augmentation", "pattern", "bound", "start"):
        for network in questions.SUBJECTS:
            arms = questions.arms_of(study, network)
            assert questions.Arm({}, 1.0) in arms.values(), study
            whole = [json.dumps(arm) for arm in arms.values()]
            assert len(set(whole)) == len(whole), study


def test_an_arm_learns_from_the_images_that_it_names(questions, small):
    some, again, other = (questions.images_for(small.train, {"IMAGES": 7}, seed) for seed in (0, 0, 1))
    assert some.labels.tolist() == again.labels.tolist() != other.labels.tolist()
    assert len(list(some)) == 1  # a smaller batch, instead of none
    assert len(some.labels) == 7
    assert questions.images_for(small.train, {"CLASSES": 0.5}, 0).labels.unique().tolist() == [0, 1, 2, 3, 4]
    assert len(questions.images_for(small.train, {}, 0).labels) == 40


def test_large_weights_may_not_be_dropped(questions):
    weight = torch.tensor([[9.0, 1, 2, 3, 9, 9, 9, 1], [1, 2, 3, 4, 4, 3, 2, 1]])
    model = nn.Sequential(nn.Linear(8, 2, bias=False))
    model[0].weight.data = weight
    choices = halve.select(model, include="*", also="*").masked
    least = {"0": 1 / weight}  # as if the smallest were the best
    with questions.patched(Sampler, "_forbidden", questions.bounded(0.5)):
        bound = halve.MaskSet(Sampler(choices, {"0": weight}, least, 8.0).masks())
    free = halve.MaskSet(Sampler(choices, {"0": weight}, least, 8.0).masks())
    assert free["0"].kept().int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0, 1, 1]]
    # above the median, 3: of three in a block two can be kept; where there is one, another joins it
    assert bound["0"].kept().int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0, 0, 1]]
    assert questions.dropped_above(model, free, 0.5) == 5 / 6
    assert questions.dropped_above(model, bound, 0.5) == 1 / 6


def test_views_are_parts_of_the_augmentation(questions):
    images = torch.rand(64, 1, 8, 8)
    shifted, mixed = (questions.view(kind)(images, torch.Generator().manual_seed(0)) for kind in ("shifted", "mixed"))
    values = set(images.flatten().tolist()) | {0.0}
    assert set(shifted.flatten().tolist()) <= values  # moved, not mixed
    same = (mixed == images).flatten(1).all(1)
    assert 0.2 < same.float().mean() < 0.8  # the rest is mixed where it was
    assert not torch.equal(shifted, images)


def test_runs_are_recorded_once_and_shared_by_studies(questions, small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(questions, "subject", lambda *args: small)
    out = tmp_path / "found.json"
    options = ["--steps", "2", "--seeds", "0", "--out", str(out), "--device", "cpu", "--studies"]
    questions.main([*options, "bound", "pattern"])
    records = json.loads(out.read_text())
    assert [r["arm"] for r in records][:2] == ["none", "0.99"]
    default = {r["study"]: r for r in records if r["setting"] == {}}
    assert default["pattern"]["arm"] == "2:4, learned"
    assert default["pattern"]["seconds"] == default["bound"]["seconds"]
    assert default["bound"]["dropped_above"].keys() == {f"{share:g}" for share in questions.BOUNDS}
    first = records[0]
    assert first["images"] == 20
    assert first["learned_from"] == 40
    assert {"network", "steps", "batch", "top1", "agreement", "kl", "hardware", "versions", "date"} <= first.keys()
    assert all(torch.isfinite(torch.tensor(r["kl"])) for r in records)
    assert capsys.readouterr().out.count("KL") == len(records)
    monkeypatch.setattr(questions, "run", None)
    questions.main([*options, "bound", "pattern"])
    questions.main([*options, "start", "--arms", "magnitude, lo*"])
    records.append(default["bound"] | {"study": "start", "arm": "magnitude, long"})
    assert json.loads(out.read_text()) == records


def test_no_run_is_started_that_would_end_too_late(questions, small, tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "subject", lambda *args: small)
    monkeypatch.setattr(questions, "run", None)
    with pytest.raises(SystemExit, match="no time for start"):
        questions.main(["--studies", "start", "--seconds", "-1", "--out", str(tmp_path / "found.json")])


@pytest.mark.parametrize("study", ["objective", "start", "augmentation"])
def test_all_arms_of_a_study_make_masks(questions, small, study):
    for name, arm in questions.arms_of(study, "digits").items():
        if arm.setting.get("IMAGES", 0) > 40:
            continue
        setting = arm.setting | ({"PERMUTE": 0.2} if "PERMUTE" in arm.setting else {})
        found = questions.run(small, questions.Arm(setting), 2 if arm.share else 0, 0)
        assert 0 <= found["agreement"] <= 1, name
        assert ("unseen" in found) == name.endswith("half")


def test_bands_hold_all_of_a_map_from_constant_to_alternating(experiment):
    by_frequency = experiment("lost_information").by_frequency
    maps = torch.randn(3, 5, 9, 12, dtype=torch.double)
    assert by_frequency(maps).sum().item() == pytest.approx(maps.square().sum().item())
    assert by_frequency(torch.ones(1, 1, 8, 8)).tolist() == pytest.approx([64, 0, 0, 0], abs=1e-4)
    checkers = (-1.0) ** (torch.arange(8)[:, None] + torch.arange(8))
    assert by_frequency(checkers.expand(1, 1, 8, 8)).tolist() == pytest.approx([0, 0, 0, 64], abs=1e-4)
    slow = torch.cos(2 * torch.pi * torch.arange(8) / 8).expand(1, 1, 8, 8)
    assert by_frequency(slow).tolist() == pytest.approx([0, 32, 0, 0], abs=1e-4)


def test_a_layer_alone_loses_what_its_mask_takes(experiment, small):
    model, batches = small.model, list(small.rest)
    free = model.layer1[0].conv1
    with torch.no_grad():
        free.weight *= halve.prune(model, progress=False)["layer1.0.conv1"].kept()
    masks = halve.prune(model, progress=False)
    found = experiment("lost_information").layers_alone(model, masks, batches)
    assert list(found) == list(masks)
    nothing = found["layer1.0.conv1"]
    assert (nothing["feature_error"], nothing["agreement"], nothing["dropped"]) == (0, 1, 0)
    assert nothing["kl"] == pytest.approx(0, abs=1e-12)
    layer = found["layer2.1.conv2"]
    assert 0 < layer["feature_error"] < 1
    assert 0 <= layer["offset"] <= 1
    shares = [band["error"] for band in layer["bands"].values() if band["error"] is not None]
    assert sum(shares) == pytest.approx(1)
    alone = halve.apply(model, masks.without([name for name in masks if name != "layer2.1.conv2"]))
    with torch.no_grad():
        same = [alone(x).argmax(1) == model(x).argmax(1) for x, _ in batches]
    assert layer["agreement"] == torch.cat(same).float().mean().item()


def test_norms_with_batchnorm_folded_do_not_see_the_scale_of_weights(experiment):
    torch.manual_seed(0)
    dropped_norms = experiment("weight_decay").dropped_norms
    model = DigitsResNet(8).eval()
    masks = halve.prune(model, progress=False)
    before = dropped_norms(model, masks)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight *= 0.5
            if isinstance(module, nn.BatchNorm2d):
                module.running_var *= 0.25
                module.eps *= 0.25
    after = dropped_norms(model, masks)
    assert after["stored"] == pytest.approx(before["stored"] / 2)
    assert after["folded"] == pytest.approx(before["folded"], rel=1e-5)
    assert after["relative"] == pytest.approx(before["relative"])
    assert 0 < after["relative"] < 1


def test_charts_show_every_point_within_the_card(experiment):
    charts = experiment("charts")
    rows = [("one", {"halve": charts.Point.of([0.002, 0.01])}), ("two", {"halve": charts.Point.of([7.0])})]
    panel = charts.Panel("y", "x", {"halve": [(1.0, charts.Point.of([3.0])), (2.0, charts.Point.of([4.0, 5.0]))]}, {})
    for drawn in (
        charts.rows_of_points("a & b", "KL", rows, {"halve": "learned"}, ["note"]),
        charts.panels("curves", [panel._replace(x_names={1.0: "1", 2.0: "2"}, log=False)], {}, []),
    ):
        svg = xml.dom.minidom.parseString(drawn).documentElement
        width, height = (float(size) for size in svg.getAttribute("viewBox").split()[2:])
        circles = svg.getElementsByTagName("circle")
        assert len(circles) >= 2
        for circle in circles:
            assert 0 < float(circle.getAttribute("cx")) < width
            assert 0 < float(circle.getAttribute("cy")) < height


def test_ticks_enclose_what_is_shown(experiment):
    charts = experiment("charts")
    for low, high in ((0.004, 2.0), (0.01, 0.01), (1.0, 1.0), (97.3, 99.1), (0.13, 0.92)):
        for ticks in (charts.log_ticks(low, high), charts.linear_ticks(low, high)):
            assert ticks[0] <= low <= high <= ticks[-1]
            assert 2 <= len(ticks) <= 6
            assert ticks == sorted(set(ticks))
