"""Masks learned by two processes under torchrun, beside one process with as many images in a step.

    PYTHONPATH=ASSETS python experiments/processes.py ASSETS --work WORK [--network resnet50_v1] [--steps 120]
        [--images 32] [--size 112] [--seeds 0 1 2]

ASSETS has the layout of accuracy.py. Both learn on the CPU, with the same number of threads in all. Some classes are
held back (as in screen.py), and masks are measured on these. The first seed is learned once more by two processes, of
which one is killed halfway; both are then started again and must return the masks of the run that was not interrupted,
bit for bit. What WORK has is not learned again. Writes experiments/results/processes.json.
"""

import argparse
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accuracy import NETWORKS, Pictures, load, update
from screen import held_back, measured
from torch import Tensor

import halve
from halve.learn.run_state import FORMAT
from halve.machine import device_name
from halve.masks import storage

RESULTS = Path(__file__).parent / "results" / "processes.json"
KILLED, SAVE_SECONDS = "killed", 10.0


class Dying:
    """Batches, after some of which the process that reads them is killed."""

    def __init__(self, pictures: Pictures, batches: int) -> None:
        self.pictures, self.left = pictures, batches

    def __len__(self) -> int:
        return len(self.pictures)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.pictures:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps masks and states")
    parser.add_argument("--network", default="resnet50_v1", choices=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--images", type=int, default=32, help="in a step, of all processes together")
    parser.add_argument("--size", type=int, default=112, help="of the images, in pixels")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--measure", type=int, default=192, help="images of each folder to measure on, at most")
    parser.add_argument("--note", default="", help="what else ran on the machine at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--learn", metavar="NAME", help=argparse.SUPPRESS)  # what one of the processes does
    parser.add_argument("--batches", type=int, help=argparse.SUPPRESS)  # after which the last process is killed
    options = parser.parse_args()
    network = NETWORKS[options.network]
    network = network._replace(size=options.size, batch=options.images // int(os.environ.get("WORLD_SIZE", "1")))
    model = network.model(options.network, options.assets)
    everything = load(options.assets, network.train, network.size, network, "cpu")
    away, rest = held_back(everything, options.assets, network.train, options.measure)
    if options.learn:
        learn(options, model, everything.part(~away, options.seeds[0]))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    common = {
        "network": options.network,
        "steps": options.steps,
        "images": options.images,
        "size": options.size,
        "threads": torch.get_num_threads(),
        "hardware": ", ".join(filter(None, (device_name(torch.device("cpu")), options.note))),
        "versions": {"halve": halve.__version__, "torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
    }
    records: list[dict[str, Any]] = []
    for seed in options.seeds:
        for processes in (1, 2):
            masks, facts = learned(options, processes, seed)
            found = measured(model, masks[0], rest, network.size)
            same = all(one == masks[0] for one in masks)
            records.append({"processes": processes, "seed": seed, "same_masks": same, **facts, **found, **common})
            print({key: value for key, value in records[-1].items() if key not in common}, flush=True)
            update(options.out, lambda old: records)
    records.append({"processes": 2, "seed": options.seeds[0], **killed(options), **common})
    print({key: value for key, value in records[-1].items() if key not in common}, flush=True)
    update(options.out, lambda old: records)


def learned(options: argparse.Namespace, processes: int, seed: int) -> tuple[list[halve.MaskSet], dict[str, Any]]:
    """The masks that each of the processes returns, and how long the slowest took."""
    name = run_name(options, str(processes), seed)
    if not all(facts_file(options, name, rank).exists() for rank in range(processes)):
        start(options, processes, seed, name).check_returncode()
    facts = [json.loads(facts_file(options, name, rank).read_text()) for rank in range(processes)]
    return saved(options, name, processes), {"seconds": max(fact["seconds"] for fact in facts)}


def killed(options: argparse.Namespace) -> dict[str, Any]:
    """Kill one of two processes halfway, start both again, and compare their masks with those of a whole run."""
    seed, name = options.seeds[0], run_name(options, KILLED, options.seeds[0])
    state_file(options, name).unlink(missing_ok=True)
    half = ["--batches", str(options.steps)]  # each step takes a batch for each process
    if start(options, 2, seed, name, half).returncode == 0:
        raise SystemExit("no process was killed")
    _, header, _ = storage.read(state_file(options, name), [FORMAT])
    start(options, 2, seed, name).check_returncode()
    whole = saved(options, run_name(options, "2", seed), 2)
    return {"resumed_from": header["step"], "same_masks": all(one == whole[0] for one in saved(options, name, 2))}


def start(
    options: argparse.Namespace, processes: int, seed: int, name: str, more: Sequence[str] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Learn in some processes, which share the threads."""
    arguments = [str(Path(__file__)), str(options.assets), "--work", str(options.work), "--network", options.network]
    for key in ("steps", "images", "size"):
        arguments += [f"--{key}", str(getattr(options, key))]
    arguments += ["--seeds", str(seed), "--learn", name, *more]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port", str(port)]
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes))}
    command = [sys.executable, *(torchrun if processes > 1 else []), *arguments]
    return subprocess.run(command, env=os.environ | threads)


def learn(options: argparse.Namespace, model: torch.nn.Module, pictures: Pictures) -> None:
    """Learn as one of the processes, and keep what it returns."""
    rank, began = int(os.environ.get("RANK", "0")), time.perf_counter()
    saving: dict[str, Any] = {}
    if options.learn.startswith(KILLED):
        state = state_file(options, options.learn)
        saving = {"run_state": state, "save_every": SAVE_SECONDS, "resume": state.exists()}
    data = Dying(pictures, options.batches) if options.batches and rank > 0 else pictures
    fixed = {"permute": False, "validation": False, "progress": False}
    masks = halve.learn(model, data, steps=options.steps, seed=options.seeds[0], **fixed, **saving)
    masks.save(options.work / f"{options.learn}.{rank}.masks.safetensors", force=True)
    facts = {"seconds": round(time.perf_counter() - began, 1)}
    facts_file(options, options.learn, rank).write_text(json.dumps(facts))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_name(options: argparse.Namespace, which: str, seed: int) -> str:
    """The name of a run in WORK: whatever its masks depend on.

    >>> run_name(argparse.Namespace(network="resnet50_v1", steps=120, images=32, size=112), "2", 0)
    '2_0_resnet50_v1_120_steps_32_images_112_px'
    """
    return f"{which}_{seed}_{options.network}_{options.steps}_steps_{options.images}_images_{options.size}_px"


def saved(options: argparse.Namespace, name: str, processes: int) -> list[halve.MaskSet]:
    return [halve.load(options.work / f"{name}.{rank}.masks.safetensors") for rank in range(processes)]


def state_file(options: argparse.Namespace, name: str) -> Path:
    file: Path = options.work / f"{name}.learning.safetensors"
    return file


def facts_file(options: argparse.Namespace, name: str, rank: int) -> Path:
    file: Path = options.work / f"{name}.{rank}.json"
    return file


if __name__ == "__main__":
    main()
