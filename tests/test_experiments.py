"""Experiments run end to end, with small networks in place of large ones."""

import argparse
import importlib
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.segmentation.fcn import FCNHead

import halve
from halve.select.speed_plan import LayerSpeed, SpeedPlan
from tests.detectors import Backbone, lively

ROOT = Path(__file__).parent.parent
SMALL = (
    "--device cpu --size 48 --batch 4 --train-seconds 1 --learn-batch 4 --learn-minutes 0.05 --tests 4 --time-batch 2 "
    "--time-seconds 0.1"
)
QUICKLY = pytest.mark.filterwarnings("ignore::halve.errors.LearningWarning", "ignore::halve.errors.EngineWarning")
METHODS = ["dense", "magnitude", "reconstruct", "learned"]


@pytest.fixture
def experiment(monkeypatch):
    """A module of experiments/, by name."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module


def test_boxes_enclose_the_pixels_of_a_shape_that_is_alone(experiment):
    scenes = experiment("scenes").render(40, 96, torch.Generator().manual_seed(0))
    assert scenes.images.shape == (40, 3, 96, 96)
    assert scenes.images.min() >= 0
    assert scenes.images.max() <= 1
    kinds, alone = set(), 0
    for pixels, target in zip(scenes.pixels, scenes.targets, strict=True):
        kinds |= set(target["labels"].tolist())
        if len(target["labels"]) != 1 or len(pixels.unique()) != 2:
            continue
        rows, columns = (pixels == target["labels"]).nonzero().T
        extent = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        assert (extent - target["boxes"][0]).abs().max() < 3.5  # the tip of a star is thinner than a pixel
        alone += 1
    assert alone > 4
    assert kinds == set(range(1, 11))


def test_scenes_are_the_same_for_the_same_seed(experiment):
    stream = experiment("scenes").Stream(2, 2, 32, 5, "cpu", "segmentation")
    first, again = ([images for images, _ in stream] for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(*first)


def test_training_lowers_the_loss(experiment):
    torch.manual_seed(0)
    model, data = nn.Conv2d(1, 1, 1), torch.rand(8, 1, 4, 4)
    losses = []

    def loss_of(model, batch):
        losses.append((model(batch) - 3 * batch).square().mean())
        return losses[-1]

    facts = experiment("trained").train_(model, [data] * 1000, loss_of, 1.0, 0.05)
    assert facts["train_steps"] == len(losses) > 10
    assert losses[-1] < 0.5 * losses[0]


def tiny_detector(size):
    anchors = AnchorGenerator(((8, 16),), ((1.0,),))
    return lively(RetinaNet(Backbone(), 11, anchor_generator=anchors, min_size=size, max_size=size))


@pytest.fixture
def detection(experiment, monkeypatch):
    detection = experiment("detection")
    monkeypatch.setattr(detection, "detector", tiny_detector)
    return detection


@QUICKLY
def test_a_detector_is_trained_masked_timed_and_exported(detection, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(detection, "find_spec", lambda name: None)
    detection.main([str(tmp_path), *SMALL.split()])
    assert "--score" in capsys.readouterr().out  # mAP needs packages that a GPU machine may not have
    found = json.loads((tmp_path / "measured.json").read_text())
    assert [r["method"] for r in found["accuracy"]] == [*METHODS, "compiled"]
    assert found["accuracy"][0]["agreement"] == 1.0
    assert found["accuracy"][0]["train_steps"] > 0
    assert found["export"]["outputs"] == ["cls_logits", "bbox_regression"]
    assert found["export"]["difference"] < 1e-4
    assert found["speed"]["median_ms"].keys() == {"eager", "compiled, dense", "compiled, 2:4"}
    for method in METHODS[1:]:
        assert (tmp_path / f"{method}.masks.safetensors").exists()


def test_a_network_that_is_there_is_not_trained_again(experiment, tmp_path):
    trained = experiment("trained")
    options = trained.parser_of("").parse_args([str(tmp_path), *SMALL.split()])
    one, facts = trained.trained(TinySegmentation, [torch.rand(2, 3, 48, 48)] * 3, total, options)
    other, again = trained.trained(TinySegmentation, [], total, options)
    assert facts == again
    assert facts["train_steps"] == 3
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())


def total(model, images):
    return model(images)["out"].square().mean()


def test_boxes_are_kept_and_read_again(detection):
    found = [
        {"boxes": torch.rand(count, 4), "labels": torch.arange(count), "scores": torch.rand(count)}
        for count in (2, 0, 3)
    ]
    again = detection.by_image(detection.flat(found), 3)
    assert all(torch.equal(one[part], other[part]) for one, other in zip(found, again, strict=True) for part in one)


@pytest.mark.skipif(not (find_spec("torchmetrics") and find_spec("pycocotools")), reason="no library for mAP")
@pytest.mark.filterwarnings("ignore")  # of the library
def test_map_is_one_for_the_boxes_that_are_there_and_falls_with_what_is_missing(detection, tmp_path):
    scenes = importlib.import_module("scenes").render(6, 64, torch.Generator().manual_seed(0))
    right = [target | {"scores": torch.ones(len(target["labels"]))} for target in scenes.targets]
    half = [{part: tensor[::2] for part, tensor in one.items()} for one in right]
    kept = {"target": scenes.targets, "dense": right, "learned": half}
    flattened = {f"{name}.{part}": x for name, one in kept.items() for part, x in detection.flat(one).items()}
    detection.save_file(flattened, tmp_path / detection.BOXES)
    measured = {"images": 6, "accuracy": [{"method": name, "agreement": None} for name in ("dense", "learned")]}
    (tmp_path / detection.MEASURED).write_text(json.dumps(measured))
    detection.score(tmp_path, tmp_path / "out.json")
    dense, learned = (r["map"] for r in json.loads((tmp_path / "out.json").read_text())["accuracy"])
    assert dense == 1.0
    assert 0.2 < learned < 0.9


class TinySegmentation(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.classifier = Backbone(), FCNHead(16, 11)

    def forward(self, images):
        return {"out": nn.functional.interpolate(self.classifier(self.backbone(images)), images.shape[2:])}


@QUICKLY
def test_a_segmentation_network_is_trained_masked_timed_and_exported(experiment, tmp_path, monkeypatch):
    segmentation = experiment("segmentation")
    monkeypatch.setattr(segmentation, "network", TinySegmentation)
    segmentation.main([str(tmp_path), *SMALL.split(), "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [r["method"] for r in found["accuracy"]] == [*METHODS, "compiled"]
    assert found["accuracy"][0]["agreement"] == 1.0
    assert all(0 <= r["miou"] < 1 for r in found["accuracy"])
    assert found["export"]["difference"] < 1e-4
    masks = halve.load(tmp_path / "learned.masks.safetensors")
    assert len(masks) == found["accuracy"][3]["masked_layers"] == 3


@QUICKLY
@pytest.mark.skipif(not find_spec("facenet_pytorch"), reason="no facenet-pytorch")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of the package
def test_a_face_detector_is_masked_compared_timed_and_exported(experiment, tmp_path):
    from PIL import Image

    scenes = importlib.import_module("scenes").render(4, 96, torch.Generator().manual_seed(0))
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        for number, image in enumerate(scenes.images):
            pixels = (255 * image).byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    folders = [str(tmp_path / name) for name in ("train", "test", "work")]
    options = "--photos 4 --tests 4 --images 64 --steps 3 --seconds 0.1 --thresholds 0.1 0.0 0.0"
    experiment("faces").main([*folders, *options.split(), "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [r["network"] for r in found["networks"]] == ["pnet", "rnet", "onet"]
    assert found["networks"][0]["masked"] == ["conv3"]
    assert "not divisible by 4" in found["networks"][0]["not_masked"]["conv2"]
    assert all(r["difference"] < 1e-4 for r in found["networks"])
    assert all(r["images"] == 4 for r in found["accuracy"])


@pytest.fixture
def photos(tmp_path):
    """A folder of eight photos of two classes, as accuracy.py takes them."""
    from PIL import Image

    names = ("n01440764", "n01443537")
    (tmp_path / "imagenet_wnids.txt").write_text("\n".join(names))
    for index, name in enumerate(names):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(4):
            colour = (60 * number, 200 * index, 7)
            Image.new("RGB", (24, 24), colour).save(tmp_path / "train" / name / f"{number}.png")
    return tmp_path


def test_photos_are_decoded_once_and_mapped_afterwards(experiment, photos, monkeypatch, capsys):
    accuracy = experiment("accuracy")
    network = accuracy.NETWORKS["resnet50_v1"]
    for size in (16, None):
        found = accuracy.load(photos, ("train",), size, network, "cpu")
        assert found.pixels.shape == (8, 3, size or 24, size or 24)
        assert found.labels.tolist() == [0] * 4 + [1] * 4
        assert found.pixels[5, :, 0, 0].tolist() == [60, 200, 7]
        assert "decoded 8 images" in capsys.readouterr().out
    monkeypatch.setattr(accuracy, "decode", None)
    again = accuracy.load(photos, ("train",), None, network, "cpu")
    assert torch.equal(again.pixels, found.pixels)


def test_listed_runs_are_made_in_their_order_and_those_without_a_plan_are_left_out(experiment, tmp_path, capsys):
    run_masks = experiment("run_masks")
    wanted = ["resnet50_v1/halve_plan_norms/noise_norms/1", "efficientnet_lite0/halve/default/0"]
    options = argparse.Namespace(
        runs=[wanted[1], "efficientnet_lite0/halve_plan/default/0", wanted[0]],
        networks=["resnet50_v1", "efficientnet_lite0"],
        final_steps=[7, 9],
        out=tmp_path,
        assets=tmp_path,
        device="cpu",
        note="",
        size=None,
        batch=None,
    )
    (tmp_path / "plan_resnet50_v1.json").touch()
    jobs = run_masks.final(options)
    assert [job.name for job in jobs] == [f"final_{run.replace('/', '_')}" for run in reversed(wanted)]
    assert "no plan for efficientnet_lite0/halve_plan/default/0" in capsys.readouterr().out
    first, second = (" ".join(job.arguments) for job in jobs)
    assert '"steps": 9' in first
    assert "--plan" not in first
    assert '"steps": 7' in second
    assert '"noise": [0.3, 0.0]' in second
    assert "--methods halve_plan_norms --seeds 1" in second


def times_of(network, batch, **ms):
    about = {"network": network, "batch": batch, "dtype": "float16", "hardware": "GPU", "date": "today"}
    about["versions"] = {"torch": "2"}
    return [
        about | {"system": system, "median_ms": time, "energy_mj_per_image": time, "round_ms": [time, 1.01 * time]}
        for system, time in ms.items()
    ]


@pytest.fixture
def speed(experiment, monkeypatch):
    """experiments/gpu_speed.py, with the times of two networks: a ResNet of two layers, and one that is slower."""
    layer = {"batch": 8, "dense_ms": 0.3, "our_dense_ms": 0.2, "sparse_ms": 0.1, "shape": "64>64 3x3 at 8 x 7 x 7"}
    found = {
        "benchmarks/results/gpu.json": times_of("resnet18", 8, best_dense=3.0, halve_dense=1.5, halve=1.0)
        + times_of("swin_t", 8, compile_freezing=1.8, best_dense=4.0, halve=2.0),
        "benchmarks/results/gpu_layers.json": [
            layer | {"network": "resnet18", "layer": "a", "sparse": True},
            layer | {"network": "resnet18", "layer": "b", "sparse": False},
            layer | {"network": "swin_t", "layer": "c", "sparse": False},
        ],
    }
    module = experiment("gpu_speed")
    for place in (module, importlib.import_module("records")):
        monkeypatch.setattr(place, "recorded", found.__getitem__)
    return module


def test_a_network_that_is_slower_is_named(speed):
    said = " ".join(speed.gpu_summary().split())
    assert "In 1 of 2 cases (2 networks at 1 batch sizes)" in said
    assert "The others: Swin-T at batch 8: 0.90x" in said
    assert "0.90 times on Swin-T (batch 8)" in said
    assert "only 0.90x on Swin-T (batch 8)" in speed.headline()


def test_a_gain_is_divided_into_kernels_and_sparsity(speed):
    assert "| ResNet-18 | 2.00 x **1.50** |" in speed.gpu_split()
    told = speed.gpu_sparsity()
    assert "| ResNet-18 | 1.10x, 1 of 2 |" in told
    assert "no sparse layer on Swin-T (batch 8)" in told
    assert "| 8 | 2 | 3.00x (3.00) | 2.00x (2.00) |" in speed.conv3x3_planned()


def test_a_dtype_in_which_only_peers_were_measured_is_not_compared(experiment, monkeypatch):
    about = {"photos": 1000, "hardware": "GPU", "versions": {"torch": "2"}, "date": "today"}
    flips = {
        ("torch, BatchNorm folded", "float16"): 4,
        ("halve", "float16"): 5,
        ("torch, BatchNorm folded", "bfloat16"): 30,
    }
    found = [about | {"system": system, "dtype": dtype, "flips": count} for (system, dtype), count in flips.items()]
    tables = experiment("tables")
    monkeypatch.setattr(tables, "recorded", {"benchmarks/results/photos.json": found}.__getitem__)
    said = " ".join(tables.photos().split())
    assert "| PyTorch, BatchNorm folded first | 4 | 30 |" in said
    assert said.endswith("halve against PyTorch with BatchNorm folded: +1 in float16 (two standard errors: 6).")


def test_runs_of_which_no_image_agrees_have_no_row(experiment, monkeypatch):
    tables = experiment("certificate_tables")
    found = [
        {"run": "digits_region_2", "network": "digits", "statement": "region", "n": 0, "disagree": 1},
        {"run": "digits_lemma_4", "network": "digits", "statement": "lemma 4", "n": 0},
        {"run": "digits_agreement", "network": "digits", "statement": "agreement", "n": 0, "differ": 0},
        {"run": "digits_agreement_0.001", "network": "digits", "statement": "joint agreement", "n": 0},
    ]
    monkeypatch.setattr(tables, "recorded", {"experiments/results/certify.json": found}.__getitem__)
    assert tables.certify_agreement() == "The networks agreed on none of the digits that were attacked."
    for made in (tables.certify_proofs, tables.certify_lemmas):
        assert len(made().splitlines()) == 2


def accuracy_of(seed, value, method="halve", **more):
    settings = {"minutes": 5.0, "steps_done": 1440 + seed}
    about = {"network": "cifar_resnet20", "data": "CIFAR-10 test", "metric": "top1", "hardware": "a machine"}
    about |= {"settings": settings, "versions": {"torch": "2"}, "date": "today"}
    return about | {"method": method, "seed": None if method == "dense" else seed, "value": value} | more


@pytest.fixture
def accuracies(experiment, tmp_path, monkeypatch):
    """A file of accuracies, measured on a GPU; `records.recorded` reads it."""
    experiment("tables")  # modules that take `recorded` from there take the true one
    path, records = tmp_path / "accuracy.json", experiment("records")
    experiment("accuracy").write(path, [accuracy_of(0, 0.9, "dense"), accuracy_of(0, 0.8), accuracy_of(1, 0.82)])
    monkeypatch.setattr(records, "recorded", lambda name: json.loads(path.read_text()))
    return path


def test_records_of_a_cpu_stand_beside_those_of_a_gpu(experiment, accuracies, tmp_path, monkeypatch):
    records, accuracy, other = experiment("records"), experiment("accuracy"), tmp_path / "other.json"
    before = json.loads(accuracies.read_text())
    other.write_text(json.dumps([accuracy_of(0, 0.71), accuracy_of(1, 0.75)]))
    monkeypatch.setattr("sys.argv", ["accuracy.py", "--merge", str(other), "--device", "cpu", "--out", str(accuracies)])
    for _ in range(2):  # the second time, they replace themselves
        accuracy.main()
        after = json.loads(accuracies.read_text())
        assert after[:3] == before
        assert [(r["device"], r["value"]) for r in after[3:]] == [("cpu", 0.71), ("cpu", 0.75)]
    row = ("cifar_resnet20", "CIFAR-10 test", "top1")
    assert records.percents(row, "halve") == [80.0, 82.0]
    assert records.percents(row, "halve", "cpu") == [71.0, 75.0]
    assert len(records.learned()) == 2
    accuracy.write(accuracies, [accuracy_of(0, 0.85, device="cuda")])  # replaces a record that does not name its device
    assert sorted(records.percents(row, "halve")) == [82.0, 85.0]


def test_the_table_of_a_cpu_appears_with_its_records(experiment, accuracies):
    accuracy, tables = experiment("accuracy"), experiment("tables")
    gpu = tables.accuracy()
    assert tables.accuracy_cpu() == ""
    accuracy.write(accuracies, [accuracy_of(seed, value, device="cpu") for seed, value in ((0, 0.71), (1, 0.75))])
    [shown] = tables.accuracy_cpu().splitlines()[2:]
    what = "| ResNet-20, CIFAR-10 test | halve | 5 | 1,440 to 1,441 | 73.00 (71.00 to 75.00) | 90.00 |"
    assert shown == f"{what} a machine, torch 2, today |"
    assert tables.accuracy() == gpu


def test_the_table_of_a_cpu_names_the_method(experiment, accuracies):
    accuracy, tables = experiment("accuracy"), experiment("tables")
    by_epochs = {"settings": {"minutes": None, "steps_done": 1759}}
    records = [
        accuracy_of(0, value, method, device="cpu") for method, value in (("halve_norms", 0.75), ("halve", 0.71))
    ]
    records += [accuracy_of(0, 0.6, "paper_tuned", device="cpu", **by_epochs), accuracy_of(0, 0.5, "magnitude")]
    accuracy.write(accuracies, records)
    shown = [line.split(" | ")[1:5] for line in tables.accuracy_cpu().splitlines()[2:]]
    assert shown == [
        ["the same at its best", "", "1,759", "60.00"],
        ["halve", "5", "1,440", "71.00"],
        ["halve, norms learned", "5", "1,440", "75.00"],
    ]


def test_the_table_of_plans_shows_the_range_over_all_seeds(experiment, accuracies):
    accuracy, tables = experiment("accuracy"), experiment("tables")
    settings = {"steps_done": 2500, "batch": 128, "size": 160}
    about = {"plan": "H200, float16, batch 256, 12ab", "dense_ms": 6.0, "unmasked_ms": 4.0, "seconds": 60.0}
    about |= {"settings": settings}
    shares = ((0, 0.5, 3.0), (1, 0.6, 2.5))
    records = [accuracy_of(seed, 0.7, "halve_plan", masked_share=share, ms=ms, **about) for seed, share, ms in shares]
    accuracy.write(accuracies, records)
    [row] = tables.plans().splitlines()[2:]
    assert row.split(" | ")[1:6] == ["50 to 60", "6.00", "4.00", "2.50 to 3.00", "2.00 to 2.40x"]


def test_what_is_run_needs_assets_and_a_network(experiment, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["accuracy.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        experiment("accuracy").main()
    assert "ASSETS and --network are required" in capsys.readouterr().err


def test_a_target_of_95_percent_is_one_of_the_gain_that_masks_bring(experiment):
    accuracy = experiment("accuracy")

    class Plan:
        faster = ("one", "two")

        def speedup(self, layers):
            assert layers == self.faster
            return 1.6

    assert accuracy.planned_options(None, "halve_plan_95") == accuracy.planned_options(Plan(), "halve") == {}
    assert accuracy.planned_options(Plan(), "halve_plan").keys() == {"plan"}
    assert accuracy.planned_options(Plan(), "halve_plan_95_norms")["min_speedup"] == pytest.approx(0.95 * 1.6)


@pytest.mark.parametrize(
    ("sparse_ms", "says"), [(3.0, None), (3.9, "1.46 x needs no masks"), (0.1, "57.00 x is out of reach")]
)
def test_a_share_of_the_speed_up_that_masks_do_not_bring_or_exceed_is_no_target(experiment, sparse_ms, says):
    small = {f"small.{i}": LayerSpeed((64, 64, 3, 3), "", 0.2, 0.1) for i in range(4)}
    layers = small | {"large": LayerSpeed((2048, 512, 1, 1), "", 0.1, 0.085)}
    plan = SpeedPlan(layers, "NVIDIA H200", "float16", 8, (3, 8, 8), 6.0, 4.0, sparse_ms)
    assert experiment("accuracy").without_target(plan) == says


def test_masks_are_judged_by_images_that_they_are_not_learned_from(experiment):
    accuracy = experiment("accuracy")
    network = accuracy.NETWORKS["cifar_resnet20"]._replace(batch=64)
    pixels = torch.arange(200, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    everything = accuracy.Pictures(pixels, torch.arange(200), network, seed=3)
    train, rest = accuracy.validated(everything, 3)
    assert (len(train.labels), len(rest.labels), train.seed, rest.seed) == (190, 10, 3, None)
    learned = {int(label) for _ in range(5) for _, labels in train for label in labels}
    assert not learned & {int(label) for _, labels in rest for label in labels}
    few = everything.part(torch.arange(50), 3)
    assert accuracy.validated(few, 3) == (few, None)


def of_processes(count, seed, kl, **more):
    about = {"network": "resnet50_v1", "steps": 120, "images": 32, "size": 112, "threads": 2, "hardware": "a machine"}
    about |= {"versions": {"torch": "2"}, "date": "today", "processes": count, "seed": seed, "same_masks": True}
    return about | ({"seconds": 60.0, "kl_in20_train": kl} if kl else {}) | more


def test_two_processes_stand_beside_one(experiment, monkeypatch):
    tables, shown = experiment("tables"), []
    monkeypatch.setattr(tables, "recorded_if_any", {"experiments/results/processes.json": shown}.__getitem__)
    assert tables.processes() == ""
    shown += [of_processes(1, 0, 0.5), of_processes(1, 1, 0.7), of_processes(2, 0, 0.55)]
    text = tables.processes()
    assert "| 1 | 2 | 0.600 (0.500 to 0.700) | 60 s |\n| 2 | 1 | 0.550 (0.550) | 60 s |" in text
    assert "both processes are bit for bit the same." in " ".join(text.split())
    shown.append(of_processes(2, 0, None, resumed_from=55))
    assert "both went on from step 55." in " ".join(tables.processes().split())
    shown.append(of_processes(2, 1, 0.6, same_masks=False))
    assert "are not the same" in " ".join(tables.processes().split())


def test_one_of_two_processes_is_killed_after_some_batches(experiment, monkeypatch):
    module, killed = experiment("processes"), []
    monkeypatch.setattr(module.os, "kill", lambda *arguments: killed.append(arguments))
    dying = iter(module.Dying([1, 2, 3], 2))
    assert (next(dying), next(dying), killed) == (1, 2, [])
    next(dying)
    assert len(killed) == 1


def test_processes_learn_again_if_an_option_changes_or_a_file_is_missing(experiment, tmp_path, monkeypatch):
    module, started = experiment("processes"), []

    def start(options, processes, seed, name, more=()):
        started.append(name)
        for rank in range(processes):
            module.facts_file(options, name, rank).write_text('{"seconds": 1.0}')
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(module, "saved", lambda options, name, processes: [name] * processes)
    given = {"network": "resnet50_v1", "steps": 120, "images": 32, "size": 112, "work": tmp_path}
    for changed in ({}, {}, {"network": "cifar_resnet20"}, {"steps": 60}, {"images": 16}, {"size": 96}):
        module.learned(argparse.Namespace(**given | changed), 2, 0)
    assert len(started) == len(set(started)) == 5
    module.facts_file(argparse.Namespace(**given), started[0], 1).unlink()
    module.learned(argparse.Namespace(**given), 2, 0)
    assert started[-1] == started[0]


def budget(images, method, agreement, device="cpu", **more):
    about = {"network": "cifar_resnet20", "device": device, "images": images, "seed": 0, "method": method}
    about |= {"agreement_cifar10/train": agreement, "kl_cifar10/train": 0.1, "hardware": f"a {device}"}
    return about | {"versions": {"torch": "2"}, "date": "today"} | more


def of_budgets(device):
    found = [budget(n, method, 0.7 + n / 1e6, device) for n in (100, 45_000) for method in ("magnitude", "reconstruct")]
    for images, minutes, agreement in ((45_000, 0.5, 0.9), (45_000, 2.0, 0.95), (100, 2.0, 0.8)):
        found.append(budget(images, "halve", agreement, device, minutes=minutes, steps_done=int(1000 * minutes)))
    return found


@pytest.fixture
def budgets(experiment, monkeypatch):
    """experiments/budget_results.py, and a list of records that it shows."""
    module, shown = experiment("budget_results"), []
    monkeypatch.setattr(module, "recorded_if_any", {"experiments/results/budgets.json": shown}.__getitem__)
    return module, shown


def test_budgets_have_a_section_and_a_figure_for_each_device_that_was_measured(budgets):
    module, shown = budgets
    assert (module.budgets(), module.figures()) == ("", {})
    shown += of_budgets("cpu")
    text = module.budgets()
    assert text.startswith("## Few images, few minutes\n")
    assert "| 100 | 2 | 2,000 | 80.0 | 70.0 |  | 70.0 |\n| 45,000 | 0.5 | 500 | 90.0 | 74.5 |  | 74.5 |" in text
    assert "ResNet-20 on a CPU (a cpu, torch 2, today; `experiments/budgets.py`)." in text
    shown += of_budgets("cuda")
    assert list(module.figures()) == ["budgets-cifar-resnet20-cpu", "budgets-cifar-resnet20-cuda"]
    for name in module.figures():
        assert f"(../figures/{name}.svg)" in module.budgets()


def test_the_figure_of_budgets_has_curves_over_minutes_and_images(budgets):
    module, shown = budgets
    shown += of_budgets("cpu")
    drawn = module.figures()["budgets-cifar-resnet20-cpu"]()
    for words in ("45,000 images", "2 minutes", "minutes", "images", "0.5", "reconstruct", "a cpu, torch 2, today"):
        assert f">{words}</text>" in drawn
    assert drawn.count("<path") == 4  # learned and in one shot, twice
    shown[:] = [record for record in shown if record["images"] == 45_000]
    assert module.figures()["budgets-cifar-resnet20-cpu"]().count("<path") == 2  # no curve over images yet


def test_seeds_of_a_budget_are_shown_with_their_range(budgets):
    module, shown = budgets
    shown += [budget(100, "halve", share, minutes=2.0, steps_done=10) for share in (0.8, 0.9)]
    assert "| 100 | 2 | 10 | 85.0 (80.0 to 90.0) |" in module.budgets()
