"""Time, memory and bounds of single proofs, step by step, before a long run of certify.py on a device is planned.

    python experiments/certify_probe.py SUBJECTS [--device cuda] [--items digits stage3 all region] [--limit 15]

SUBJECTS is the folder of certify.py. Each item is the masked network and the first image on which both networks agree:
margin without changes, bound by backward passes, with optimised last slopes, and if these do not suffice with slopes
optimised inside, which ends when the item's time is up. On a GPU, the bound of the margin is also computed on the CPU
from the same intervals, and for digits all intervals; the differences are shown. An item that fails or takes too long
is reported, and the others still run. Writes a line of JSON per item to --out, and with --profile says what a backward
pass spends its time on.
"""

import argparse
import json
import math
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from certify_runs import RUNS
from certify_statements import KeepsClass
from certify_subjects import Pair, subject
from torch import Tensor

from halve.certify.attack import margin_of
from halve.certify.crown import STEPS_INSIDE, Bounds, OutOfTime
from halve.certify.memory import coefficients
from halve.certify.network import Network
from halve.certify.operators import ReLU
from halve.certify.rounding import Interval

ITEMS = {
    "digits": "digits_region_2",
    "stage3": "resnet20_stage3_0.001",
    "all": "resnet20_all_1e-05",
    "region": "resnet20_region_0.0625",
}


NETWORKS: dict[tuple[str, str], Network] = {}  # they take seconds to capture


class Probe:
    """The steps of a proof, timed."""

    def __init__(self, name: str, item: str, folder: Path, device: str, limit: float) -> None:
        self.device, run = torch.device(device), RUNS[item]
        assert isinstance(run, KeepsClass)
        assert run.size is not None
        pair = Pair(subject(run.network, folder), device, limit)
        for image in pair.subject.images.double().to(device).split(1):
            with torch.no_grad():
                scores, dense = (model(image)[0] for model in pair.models.values())
            if scores.argmax() == dense.argmax():
                break
        self.label = int(scores.argmax())
        self.found: dict[str, Any] = {"item": name, "margin": float(margin_of(scores, self.label))}
        if (run.network, device) not in NETWORKS:
            NETWORKS[run.network, device] = pair.network("masked")
        self.network = pair.captured["masked"] = NETWORKS[run.network, device]
        self.box, self.changes = run.changes(pair, "masked", image, [run.size])
        self.deadline = time.monotonic() + limit

    def step(self, name: str, optimise: bool = False, **options: Any) -> Bounds:
        """Bounds, their time, and the peak of the memory on a GPU."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started, left = time.perf_counter(), self.deadline - time.monotonic()
        bounds = Bounds(self.network, self.box, self.changes, seconds=left, **options)
        [margin] = bounds.margins([self.label], optimise)
        self.found |= {name: round(margin, 4), f"{name}_s": round(time.perf_counter() - started, 2)}
        if self.device.type == "cuda":
            self.found[f"{name}_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        return bounds

    def open(self, values: list[Any]) -> list[int]:
        """How many inputs of each ReLU may have either sign."""
        readers = [(node.operator, node.inputs[0]) for node in self.network.nodes if isinstance(node.operator, ReLU)]
        return [int(relu.open(values[source]).sum()) for relu, source in readers]

    def everything(self, inside: bool) -> Bounds:
        """All steps that there is time for; returns the bounds by backward passes."""
        wide = self.step("intervals", tighten=False)
        self.found["pass"] = passed(wide)
        tight = self.step("plain", known=wide.values)
        self.found |= {"open_before": self.open(wide.values), "open": self.open(tight.values)}
        self.step("last", optimise=True, tighten=False, known=tight.values)
        if inside and self.found["last"] <= 0:
            better = self.step("inside", optimise=True, steps=STEPS_INSIDE, known=tight.values)
            self.found["open_inside"] = self.open(better.values)
        return tight


def units(bounds: Bounds) -> tuple[Tensor, int]:
    """As many rows as are carried back at a time, from the middle of a network: they select values, or their negatives.

    The bounds are of one image.
    """
    nodes, values, fixed = bounds.network.nodes, bounds.values, bounds.fixed
    sources = [node.inputs[0] for node in nodes if isinstance(node.operator, ReLU) and not fixed[node.inputs[0]]]
    place = sources[len(sources) // 2]
    value = values[place].low
    largest = max(x.low.numel() for x, known in zip(values, fixed, strict=True) if not known)
    rows = value.new_zeros(max(1, coefficients(value.device) // largest // 2), *value.shape[1:])
    at = torch.arange(len(rows), device=rows.device)
    rows.flatten(1)[at, at % rows[0].numel()] = 1.0
    return torch.stack([rows, -rows], 1).flatten(0, 1), place


@torch.no_grad()
def passed(bounds: Bounds) -> dict[str, float]:
    """The time of a backward pass: a proof that does not end in time can be estimated by it."""
    rows, place = units(bounds)
    for _ in range(2):  # the first one takes longer
        started = time.perf_counter()
        float(bounds.lower(rows, place).sum())  # waits for a GPU
    return {"rows": len(rows), "node": place, "ms": round(1000 * (time.perf_counter() - started), 1)}


@torch.no_grad()
def profiled(bounds: Bounds) -> str:
    """What takes the time of a backward pass."""
    rows, place = units(bounds)
    with torch.profiler.profile() as found:
        float(bounds.lower(rows, place).sum())
    order = f"self_{'device' if rows.device.type == 'cuda' else 'cpu'}_time_total"
    return found.key_averages().table(sort_by=order, row_limit=14, max_name_column_width=40)


def _ended(signum: int, frame: Any) -> None:
    raise OutOfTime


def _on_cpu(values: list[Interval]) -> list[Interval]:
    return [Interval(value.low.cpu(), value.high.cpu()) for value in values]


def difference(item: str, folder: Path, tight: Bounds) -> dict[str, float]:
    """How far bounds on a GPU are from those on the CPU: of the margin, and for digits of all intervals."""
    probe = Probe("", item, folder, "cpu", math.inf)
    [there] = Bounds(tight.network, tight.box, tight.changes, False, known=tight.values).margins([probe.label])
    here = Bounds(probe.network, probe.box, probe.changes, False, known=_on_cpu(tight.values))
    found = {"margin_gpu_minus_cpu": there - here.margins([probe.label])[0]}
    if item != ITEMS["digits"]:
        return found
    alone = Bounds(probe.network, probe.box, probe.changes)
    pairs = [(a, b) for one in zip(alone.values, _on_cpu(tight.values), strict=True) for a, b in zip(*one, strict=True)]
    return found | {"intervals_gpu_vs_cpu": max(float((a - b).abs().max() / (1 + a.abs().max())) for a, b in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--items", nargs="+", default=list(ITEMS), choices=ITEMS)
    parser.add_argument("--limit", type=float, default=15.0, help="seconds for each item")
    parser.add_argument("--no-inside", action="store_true", help="do not optimise slopes inside the network")
    parser.add_argument("--profile", choices=ITEMS, help="an item")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _ended)
    for name in arguments.items:
        started, found = time.perf_counter(), {"item": name}
        probe = None
        signal.alarm(int(arguments.limit + 15))  # for what does not look at the time
        try:
            probe = Probe(name, ITEMS[name], arguments.subjects, arguments.device, arguments.limit)
            tight = probe.everything(not arguments.no_inside)
            if arguments.device == "cuda":
                probe.found |= difference(ITEMS[name], arguments.subjects, tight)
            if arguments.profile == name:
                print(profiled(tight))
        except Exception as error:  # the other items matter too
            found["failed"] = f"{type(error).__name__}: {error}"
            if not isinstance(error, OutOfTime):
                traceback.print_exc()
        finally:
            signal.alarm(0)
        found = (probe.found if probe else {}) | found | {"seconds": round(time.perf_counter() - started, 1)}
        print(json.dumps(found), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(f"{json.dumps(found)}\n")
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
