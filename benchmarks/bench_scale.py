"""Memory and time of a learning step as networks grow, from ResNet-18 to ConvNeXt-L.

    python benchmarks/bench_scale.py [--networks resnet18 ...] [--batch 64] [--size 224] [--steps 40] [--out FILE]

Each network has random weights and runs `halve.learn` with its defaults in its own process: noise as images, no search
for channel orders, nothing held back. The time is the median over tens of steps after the first ten; the memory is the
peak that PyTorch allocated (on a CPU, the largest resident size of the process). A network that does not fit is
recorded as such. The exponents of growth with the masked weights are recorded for each family. Writes
benchmarks/results/scale.json. Does nothing without a GPU, unless --device cpu is given.
"""

import argparse
import datetime
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torchvision import models

import halve
from halve.bench.records import versions
from halve.machine import device_name

RESULTS = Path(__file__).parent / "results" / "scale.json"
NETWORKS = [
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
]
EVERY = 10  # steps between reports on a GPU


def measured(network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of a step."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = models.get_model(network).eval().to(device)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    seen: list[tuple[int, float]] = []

    def report(event: Any) -> None:
        if hasattr(event, "loss") and event.step % EVERY == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seen.append((event.step, time.perf_counter()))

    options_of_run = {"permute": False, "validation": False, "progress": False, "report": report}
    masks = halve.learn(model, [images], steps=options.steps, **options_of_run)
    ms = [1e3 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(seen)]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "masked_weights": masks.weights,
        "median_ms": round(statistics.median(ms), 2),
        "peak_gb": round(peak / 1e9, 3),
        "step_graph": masks.recipe["step_graph"],
        "hardware": device_name(device),
    }


def slope(points: list[tuple[float, float]]) -> float:
    """The exponent of growth: the slope of a line through the logarithms.

    >>> slope([(1.0, 2.0), (10.0, 20.0), (100.0, 200.0)])
    1.0
    """
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    x, y = statistics.mean(xs), statistics.mean(ys)
    return round(sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs), 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", action="store_true", help="measure a single network in this process, and print it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_scale: no GPU, nothing measured")
        return
    if options.one:
        print(json.dumps(measured(options.networks[0], options)))
        return
    found = []
    for network in options.networks:
        given = ["--batch", options.batch, "--size", options.size, "--steps", options.steps, "--device", options.device]
        command = [sys.executable, __file__, "--one", "--networks", network, *map(str, given)]
        done = subprocess.run(command, capture_output=True, text=True)
        record: dict[str, Any] = {"network": network, "batch": options.batch, "size": options.size}
        if done.returncode == 0:
            record |= json.loads(done.stdout.splitlines()[-1])
        elif "OutOfMemoryError" in done.stderr:
            record |= {"error": "out of memory"}
        else:
            raise SystemExit(f"{network} failed:\n{done.stderr[-3000:]}")
        found.append(record | {"versions": versions(), "date": datetime.date.today().isoformat()})
        print({key: found[-1].get(key) for key in ("network", "masked_weights", "median_ms", "peak_gb")}, flush=True)
    fit = [r for r in found if "median_ms" in r]
    growth = {}
    for family in ("resnet", "convnext"):
        of_family = [r for r in fit if r["network"].startswith(family)]
        if len(of_family) > 1:
            growth[family] = {
                key: round(slope([(r["masked_weights"], r[key]) for r in of_family]), 2)
                for key in ("median_ms", "peak_gb")
            }
    print(f"exponents of growth with the masked weights: {growth}")
    options.out.write_text(json.dumps({"networks": found, "growth": growth}, indent=1) + "\n")


if __name__ == "__main__":
    main()
