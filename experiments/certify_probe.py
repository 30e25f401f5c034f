"""Time, memory and bounds of single proofs, step by step, before a long run of certify.py on a device is planned.

    python experiments/certify_probe.py SUBJECTS [--device cuda] [--items digits stage3 all region] [--limit 15]

SUBJECTS is the folder of certify.py. Each item is the masked network and the first image on which both networks agree:
margin without changes, bound by backward passes, with optimised last slopes, and with slopes optimised inside, which
ends when the item's time is up. On a GPU, digits are also bounded on the CPU, and the largest difference is shown. An
item that fails or takes too long is reported, and the others still run. Writes a line of JSON per item to --out.
"""

import argparse
import json
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from certify import RUNS, Prover, subject
from torch import Tensor

from halve.certify.attack import margin_of
from halve.certify.crown import STEPS_INSIDE, Bounds, OutOfTime
from halve.certify.operators import ReLU

ITEMS = {
    "digits": "digits_region_2",
    "stage3": "resnet20_stage3_0.001",
    "all": "resnet20_all_1e-05",
    "region": "resnet20_region_0.0625",
}


class Probe:
    """The steps of a proof, timed."""

    def __init__(self, name: str, item: str, folder: Path, device: str, limit: float) -> None:
        self.deadline, self.device = time.monotonic() + limit, torch.device(device)
        run = RUNS[item]
        assert run.size is not None
        self.prover = Prover(run, subject(run.network, folder), device, limit)
        model = self.prover.models["masked"]
        image = self.prover.subject.images[self.prover.agree().index(True), None].double().to(device)
        with torch.no_grad():
            scores = model(image)[0]
        self.label = int(scores.argmax())
        self.found: dict[str, Any] = {"item": name, "margin": float(margin_of(scores, self.label))}
        self.network = self.prover.network("masked")
        self.box, self.changes = self.prover._set("masked", image, [run.size])

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

    def everything(self, inside: bool) -> dict[str, Any]:
        """All steps that there is time for."""
        wide = self.step("intervals", tighten=False)
        tight = self.step("plain", known=wide.values)
        self.found |= {"open_before": self.open(wide.values), "open": self.open(tight.values)}
        self.step("last", optimise=True, tighten=False, known=tight.values)
        if inside:
            better = self.step("inside", optimise=True, steps=STEPS_INSIDE, known=tight.values)
            self.found["open_inside"] = self.open(better.values)
        return self.found


def _ended(signum: int, frame: Any) -> None:
    raise OutOfTime


def difference(item: str, folder: Path) -> float:
    """The largest difference of the ends of all intervals between a GPU and the CPU, relative to the largest value."""
    ends: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        probe = Probe("", item, folder, device, 60.0)
        bounds = Bounds(probe.network, probe.box, probe.changes)
        ends.append([end.cpu() for value in bounds.values for end in value])
    return max(float((a - b).abs().max() / (a.abs().max() + 1)) for a, b in zip(*ends, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--items", nargs="+", default=list(ITEMS), choices=ITEMS)
    parser.add_argument("--limit", type=float, default=15.0, help="seconds for each item")
    parser.add_argument("--no-inside", action="store_true", help="do not optimise slopes inside the network")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _ended)
    for name in arguments.items:
        started, found = time.perf_counter(), {"item": name}
        probe = None
        signal.alarm(int(arguments.limit + 5))  # for what does not look at the time
        try:
            probe = Probe(name, ITEMS[name], arguments.subjects, arguments.device, arguments.limit)
            probe.everything(not arguments.no_inside)
            if name == "digits" and arguments.device == "cuda":
                probe.found["difference_to_cpu"] = difference(ITEMS[name], arguments.subjects)
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
