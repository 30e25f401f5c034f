"""The paper's tables as a command, under torchrun with two processes on tiny images."""

import json
import socket
import subprocess
import sys

import pytest

import halve
from tests.pictures import class_folders
from tests.processes import ROOT, environment

# A small network in place of the paper's: everything else is what the command does.
SCRIPT = """
import sys
sys.path.insert(0, "experiments")
import paper_tables
paper_tables.EPOCHS = {"squeezenet1_1": 2}
paper_tables.main()
"""
METHODS = ("dense", "magnitude", "paper", "halve")


def command(folder, *more):
    """The command line of a run on tiny images."""
    options = ["--data", folder / "data", "--work", folder / "work", "--out", folder / "found.json", "--device", "cpu"]
    options += ["--methods", *METHODS, "--epochs", "1", "--size", "32", "--batch", "8", "--workers", "0"]
    return [str(part) for part in [folder / "script.py", *options, "--permute-seconds", "1", *more]]


def run(start, folder, *more):
    result = subprocess.run(
        [sys.executable, *start, *command(folder, *more)],
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a run with two processes leaves behind."""
    folder = tmp_path_factory.mktemp("paper")
    (folder / "script.py").write_text(SCRIPT)
    names = [f"class{index}" for index in range(6)]
    class_folders(folder / "data" / "train", names, each=10)
    class_folders(folder / "data" / "val", names, each=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", str(port)]
    (folder / "first.txt").write_text(run(torchrun, folder))
    return folder


def test_every_method_is_measured_once(folder):
    records = json.loads((folder / "found.json").read_text())
    assert [(r["method"], r["epochs"], r["seed"]) for r in records] == [
        ("dense", None, None),
        ("magnitude", None, None),
        ("paper", 1, 0),
        ("halve", 1, 0),
    ]
    for record in records:
        assert record["data"] == "12 images of 6 classes (val)"
        assert record["images"] == 12
        assert 0 <= record["top1"] <= record["top5"] <= 1
        assert record["hardware"].startswith("2 x ")
        assert record["dense"]["weights"] == "trained here"
    assert records[0]["agreement"] == 1
    assert records[0]["masked_share"] == 0
    assert records[3]["settings"]["steps_done"] == 3  # 57 images, two processes of 8 each


def test_the_network_is_trained_by_both_and_the_masks_fit_it(folder):
    assert "epoch 2 of 2" in (folder / "first.txt").read_text()
    assert not list((folder / "work").glob("*.training"))
    assert not list((folder / "work").glob("*.learning.safetensors"))
    from torchvision.models import squeezenet1_1

    from halve.sources.weights import load_weights_

    model = squeezenet1_1(num_classes=6)
    load_weights_(model, folder / "work" / "squeezenet1_1.safetensors")
    masks = halve.load(folder / "work" / "squeezenet1_1.halve.1.0.masks.safetensors")
    assert halve.verify(halve.apply(model.eval(), masks), masks).ok


def test_what_is_measured_is_not_measured_again(folder):
    before = (folder / "found.json").read_text()
    said = run([], folder)
    assert "top-1" not in said
    assert "epoch" not in said
    assert (folder / "found.json").read_text() == before


def test_a_single_process_measures_what_is_missing(folder):
    kept = [r for r in json.loads((folder / "found.json").read_text()) if r["method"] != "magnitude"]
    (folder / "found.json").write_text(json.dumps(kept))
    said = run([], folder)
    assert said.count("top-1") == 1
    assert "squeezenet1_1, magnitude" in said
