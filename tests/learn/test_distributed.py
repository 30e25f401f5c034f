import importlib.util
import json
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

import halve
from halve.errors import OptionError
from halve.learn.distributed import Processes
from halve.learn.run_state import FORMAT
from halve.masks import storage
from tests.processes import ROOT, environment
from tests.random_masks import random
from tests.tiny import convnet, costly, images, loader

pytestmark = pytest.mark.filterwarnings("ignore:the quality of the masks will be unknown")  # of so few images

# Two processes with batches of 8, or one that accumulates two of these.
TOGETHER = {"steps": 60, "lr": 0.2, "permute": False, "validation": False, "fallback": False}
KILLED = 7  # batches after which a process is killed

SCRIPT = """
import json, os, sys, torch, halve
from pathlib import Path
from tests.learn.test_distributed import TOGETHER
from tests.tiny import convnet, loader
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)
seen = []
model = convnet()
before = {key: value.clone() for key, value in model.state_dict().items()}
masks = halve.learn(model, loader(), steps=12, accumulate=2, lr=0.5, log=folder / "log.jsonl",
                    run_state=folder / "run", save_every=0, report=seen.append)
same = all(torch.equal(before[key], value) for key, value in model.state_dict().items())
halve.learn(model, loader(), steps=12, accumulate=2, lr=0.5, run_state=folder / "run", resume=True)
timed = halve.learn(model, loader(128), minutes=0.05, permute=False)
random = {"steps": 1, "lr": 1e-6, "alpha": 0.0, "final": "sample"}  # what is learned is a random mask
one_shot = halve.learn(model, loader(128), permute=False, **random)
together = halve.learn(model, loader(256, 8), **TOGETHER)
together.save(folder / f"together{rank}.masks.safetensors")
masks.save(folder / f"steps{rank}.masks.safetensors")
timed.save(folder / f"timed{rank}.masks.safetensors")
one_shot.save(folder / f"one_shot{rank}.masks.safetensors")
facts = {"reports": len(seen), "steps": timed.recipe["steps_done"], "same": same}
(folder / f"facts{rank}.json").write_text(json.dumps(facts))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


# The first time a process is killed in the middle of a run; the second time that run is resumed, and repeated whole.
RESUMED = """
import os, signal, sys, torch, halve
from pathlib import Path
from tests.learn.test_distributed import KILLED
from tests.tiny import convnet, loader
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)

class Batches:
    def __init__(self, dying):
        self.batches, self.dying, self.given = list(loader(48)), dying, 0
    def __len__(self):
        return len(self.batches)
    def __iter__(self):
        for batch in self.batches:
            self.given += 1
            if self.dying and self.given > KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

def learned(state, dying=False, **more):
    options = {"steps": 12, "lr": 0.5, "permute": False, "validation": False}
    return halve.learn(convnet(), Batches(dying), run_state=folder / state, save_every=0, **options, **more)

resume = (folder / "run").exists()
masks = learned("run", dying=rank == 1 and not resume, resume=resume)
masks.save(folder / f"resumed{rank}.masks.safetensors")
learned("whole").save(folder / f"whole{rank}.masks.safetensors")
torch.distributed.destroy_process_group()
"""


BUDGET = """
import os, sys, warnings, torch, halve
from pathlib import Path
from halve.errors import LearningWarning
from tests.random_masks import random
from tests.tiny import costly
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)

def progress(items, what):
    with (folder / f"progress{rank}.txt").open("a") as shown:
        shown.write(f"{what}\\n")
    return items

options = {"steps": 40, "max_drop": 0.05, "permute": False, "fallback": False}
warnings.simplefilter("error", LearningWarning)
masks = halve.learn(costly(), random(800, 16), progress=progress, **options)
masks.save(folder / f"budget{rank}.masks.safetensors")
torch.distributed.destroy_process_group()
"""


def torchrun(script, folder):
    """Run a script in two processes."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", str(port)]
    return subprocess.run(
        [*command, str(folder / "script.py"), str(folder)],
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes of a torchrun leave behind."""
    folder = tmp_path_factory.mktemp("ranks")
    result = torchrun(SCRIPT, folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_two_processes_learn_the_same_masks_to_the_bit(folder):
    for name in ("steps", "timed"):
        one, other = (halve.load(folder / f"{name}{rank}.masks.safetensors") for rank in range(2))
        assert one == other
        assert halve.verify(halve.apply(convnet(), one), one).ok


def test_two_processes_return_the_same_one_shot_masks_where_those_are_better(folder):
    one, other = (halve.load(folder / f"one_shot{rank}.masks.safetensors") for rank in range(2))
    assert one == other
    assert one.recipe == other.recipe | {"seconds": one.recipe["seconds"]}
    assert one.recipe["quality"]["returned"] != "learned"
    assert halve.load(folder / "timed1.masks.safetensors").recipe["quality"]["images"] == 8


def test_two_processes_learn_from_more_than_one_alone_would_see(folder):
    alone = halve.learn(convnet(), loader(), steps=12, accumulate=2, lr=0.5)
    assert halve.load(folder / "steps0.masks.safetensors").difference(alone) > 0


def test_the_first_process_alone_reports_and_writes(folder):
    facts = [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]
    assert [fact["reports"] for fact in facts] == [13, 0]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 12]
    _, header, tensors = storage.read(folder / "run", [FORMAT])
    assert (header["step"], header["batches"], header["identity"]["processes"]) == (12, 24, 2)
    assert tensors["logits"].isfinite().all()
    written = {path.name for path in folder.iterdir()} - {"script.py"}
    assert len(written) == 12, written


def test_two_processes_learn_as_well_as_one_with_the_same_images_per_step(folder):
    one, other = (halve.load(folder / f"together{rank}.masks.safetensors") for rank in range(2))
    assert one == other

    def kl(masks):
        return halve.evaluate(convnet(), masks, images(512, seed=5), progress=False).kl

    alone = [kl(halve.learn(convnet(), loader(256, 8), accumulate=2, seed=seed, **TOGETHER)) for seed in range(4)]
    start = kl(halve.prune(convnet()))
    spread = max(alone) - min(alone)
    assert max(alone) < start / 2  # it learns: without that, the comparison says nothing
    assert min(alone) - spread <= kl(one) <= max(alone) + spread


def test_a_run_goes_on_after_one_process_was_killed(tmp_path):
    killed = torchrun(RESUMED, tmp_path / "run")
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    _, header, _ = storage.read(tmp_path / "run" / "run", [FORMAT])
    assert 0 < header["step"] < 12
    again = torchrun(RESUMED, tmp_path / "run")
    assert again.returncode == 0, again.stderr[-3000:]
    found = [
        halve.load(tmp_path / "run" / f"{name}{rank}.masks.safetensors")
        for name in ("resumed", "whole")
        for rank in range(2)
    ]
    assert all(masks == found[0] for masks in found)


def test_two_processes_learn_the_layers_within_a_budget_again_and_the_first_shows_progress(tmp_path):
    result = torchrun(BUDGET, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    one, other = (halve.load(tmp_path / f"budget{rank}.masks.safetensors") for rank in range(2))
    assert one == other
    assert one.recipe == other.recipe | {"seconds": one.recipe["seconds"]}
    assert one.recipe["left_dense"]
    assert one.recipe["relearned"] == 10
    assert one.recipe["quality"]["returned"] == "learned"
    kept = halve.evaluate(costly(), one, [random(800, 16)[-40:]], progress=False).agreement
    assert one.recipe["drop"] == pytest.approx(1 - kept)
    assert "cost of each layer" in (tmp_path / "progress0.txt").read_text()
    assert not (tmp_path / "progress1.txt").exists()


def test_a_budget_by_the_clock_stops_both_after_the_same_step(folder):
    facts = [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]
    assert facts[0]["steps"] == facts[1]["steps"] > 1
    assert facts[0]["same"]
    assert facts[1]["same"]


def test_one_process_is_alone_and_needs_no_accelerate():
    processes = Processes(torch.device("cpu"))
    layer = nn.Linear(2, 2)
    assert (processes.rank, processes.count, processes.is_main) == (0, 1, True)
    assert processes.wrap(layer) is layer
    assert processes.broadcast(0.25) == 0.25
    processes.start_trackers({"lr": 1})
    processes.track({"loss": 1.0}, 1)
    processes.stop_trackers()


@pytest.mark.parametrize(
    ("trackers", "says"),
    [
        ("nope", "unknown tracker 'nope'; known are .*tensorboard"),
        (["nope"], "unknown tracker 'nope'"),
        ([5], "unknown tracker 5"),
        (5, "trackers must be a list of names such as 'tensorboard', got 5"),
    ],
)
def test_a_tracker_that_does_not_exist_is_refused(trackers, says):
    with pytest.raises(OptionError, match=says):
        halve.learn(convnet(), loader(), steps=1, trackers=trackers)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_not_left_out_in_silence():
    with pytest.raises(OptionError, match="tracker 'wandb' is not installed: pip install wandb"):
        halve.learn(convnet(), loader(), steps=1, trackers="wandb")


def test_learning_alone_does_not_import_accelerate(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)  # importing it raises
    assert halve.learn(convnet(), loader(), steps=1).recipe["steps_done"] == 1
    with pytest.raises(ImportError):
        halve.learn(convnet(), loader(), steps=1, trackers=["tensorboard"])
