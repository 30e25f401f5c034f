"""Time select, prune, save, load, apply and verify on torchvision networks with random weights.

    python benchmarks/bench_core.py

Writes benchmarks/results/core.json: one record per network and step, the median of three runs.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision

import halve
from halve.machine import device_name

RESULTS = Path(__file__).parent / "results" / "core.json"
NETWORKS = ("resnet18", "resnet50", "convnext_tiny", "mobilenet_v3_large", "efficientnet_b0")
RUNS = 3


def main() -> None:
    records = []
    for network in NETWORKS:
        model = torchvision.models.get_model(network, weights=None).eval()
        masks = halve.prune(model)
        sparse = halve.apply(model, masks)
        with tempfile.TemporaryDirectory() as folder:
            path = masks.save(Path(folder) / "net.masks.safetensors")
            steps: dict[str, Callable[[], object]] = {
                "select": lambda model=model: halve.select(model),
                "prune": lambda model=model: halve.prune(model),
                "save": lambda masks=masks, path=path: masks.save(path),
                "load": lambda path=path: halve.load(path),
                "apply": lambda model=model, masks=masks: halve.apply(model, masks),
                "verify": lambda sparse=sparse, masks=masks: halve.verify(sparse, masks),
            }
            bits = 8 * path.stat().st_size / masks.weights
            for step, run in steps.items():
                records.append(
                    {
                        "network": network,
                        "step": step,
                        "median_s": round(statistics.median(timed(run) for _ in range(RUNS)), 4),
                        "masked_weights": masks.weights,
                        "file_bits_per_weight": round(bits, 3),
                        "hardware": device_name(torch.device("cpu")),
                        "versions": {"halve": halve.__version__, "torch": torch.__version__},
                    }
                )
                print(f"{network:20} {step:8} {records[-1]['median_s']:8.3f} s")
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
