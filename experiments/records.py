"""The recorded results, as tables and figures need them."""

import functools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halve.bench.ratio import Ratio, paired_ratio
from halve.bench.systems import DENSE

ROOT = Path(__file__).parent.parent
NAMES = {
    "cifar_resnet20": "ResNet-20",
    "cifar_resnet56": "ResNet-56",
    "resnet50_v1": "ResNet-50",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "convnext_tiny": "ConvNeXt-T",
    "convnext_small": "ConvNeXt-S",
    "convnext_base": "ConvNeXt-B",
    "convnext_large": "ConvNeXt-L",
    "mobilenet_v3_large": "MobileNetV3-L",
    "efficientnet_b0": "EfficientNet-B0",
    "efficientnet_v2_s": "EfficientNetV2-S",
    "densenet121": "DenseNet-121",
    "googlenet": "GoogLeNet",
    "resnext50_32x4d": "ResNeXt-50",
    "regnet_y_8gf": "RegNetY-8GF",
    "swin_t": "Swin-T",
    "vgg16_bn": "VGG-16",
    "vit_b_16": "ViT-B/16",
}
MAIN = ("resnet", "convnext")  # networks with a target speed-up; the aim for others is never to be slower
METHODS = {
    "dense": "dense",
    "magnitude": "magnitude",
    "magnitude_permuted": "magnitude, permuted",
    "paper": "the paper's recipe",
    "paper_tuned": "the same at its best",
    "halve": "halve",
    "halve_recalibrated": "halve, recalibrated",
    "halve_norms": "halve, norms learned",
    "halve_plan": "halve, where it pays",
    "halve_plan_norms": "halve, where it pays, norms learned",
    "halve_plan_95": "halve, at 95 % of the speed-up",
    "halve_plan_95_norms": "halve, at 95 % of the speed-up, norms learned",
}
METRICS = {"top1": "top-1", "agreement": "agreement"}


@functools.cache
def recorded(path: str) -> Any:
    """The content of a JSON file in the repository."""
    return json.loads((ROOT / path).read_text())


def recorded_if_any(path: str) -> list[dict[str, Any]]:
    """The records of a JSON file in the repository; none if the experiment has not run yet."""
    return recorded(path) if (ROOT / path).exists() else []


def device_of(record: dict[str, Any]) -> str:
    """The kind of device of a record; records that do not name it are of a GPU.

    >>> device_of({"device": "cpu"}), device_of({})
    ('cpu', 'cuda')
    """
    return str(record.get("device", "cuda"))


def accuracies(device: str = "cuda") -> list[dict[str, Any]]:
    """One record per network, images, method and seed, of one kind of device."""
    return [r for r in recorded("experiments/results/accuracy.json") if device_of(r) == device]


def accuracy_rows(device: str = "cuda") -> list[tuple[str, str, str]]:
    """(network, images, metric) of everything that was measured."""
    return list(dict.fromkeys((r["network"], r["data"], r["metric"]) for r in accuracies(device)))


def percents(row: tuple[str, str, str], method: str, device: str = "cuda") -> list[float]:
    """What the seeds of a method reached, in percent."""
    wanted, found = (*row, method), accuracies(device)
    return [100 * r["value"] for r in found if (r["network"], r["data"], r["metric"], r["method"]) == wanted]


def percent(row: tuple[str, str, str], method: str) -> float:
    """The mean over seeds, in percent."""
    return statistics.mean(percents(row, method))


def learned(network: str | None = None) -> list[dict[str, Any]]:
    """One record for each run of `halve.learn`."""
    runs = {
        (r["network"], r["seed"]): r for r in accuracies() if r["method"] == "halve" and network in (None, r["network"])
    }
    return list(runs.values())


def times() -> dict[tuple[str, int, str], float]:
    """Milliseconds by (network, batch, system) on a GPU."""
    records = recorded("benchmarks/results/gpu.json")
    return {(r["network"], r["batch"], r["system"]): r["median_ms"] for r in records if r.get("median_ms")}


def fastest_dense(network: str, batch: int) -> str | None:
    """The system of the fastest dense version: our folded graph on library kernels, or torch.compile."""
    ms = times()
    found = [system for system in DENSE if (network, batch, system) in ms]
    return min(found, key=lambda system: ms[network, batch, system], default=None)


def best_dense(network: str, batch: int) -> float | None:
    """Milliseconds of the fastest dense version."""
    system = fastest_dense(network, batch)
    return None if system is None else times()[network, batch, system]


def paired(network: str, batch: int) -> Ratio | None:
    """The speed-up over the fastest dense version with its interval; None if rounds were not recorded."""
    rounds = {
        r["system"]: r["round_ms"]
        for r in recorded("benchmarks/results/gpu.json")
        if (r["network"], r["batch"]) == (network, batch) and "round_ms" in r
    }
    dense = fastest_dense(network, batch)
    if "halve" not in rounds or dense not in rounds:
        return None
    return paired_ratio(rounds[dense], rounds["halve"])


def networks_and_batches() -> list[tuple[str, int]]:
    return list(dict.fromkeys((r["network"], r["batch"]) for r in recorded("benchmarks/results/gpu.json")))


def speedups(main: bool) -> dict[tuple[str, int], float]:
    """Speed-ups over the best dense version, of the main networks or of the others, by network and batch size."""
    ms, found = times(), {}
    for network, batch in networks_and_batches():
        dense, ours = best_dense(network, batch), ms.get((network, batch, "halve"))
        if dense and ours and main == is_main(network):
            found[network, batch] = dense / ours
    return found


def is_main(network: str) -> bool:
    return network.startswith(MAIN)


def mask_file(network: str = "resnet50") -> tuple[float, float]:
    """Size of a mask file: bits per weight, and megabytes."""
    records = recorded("benchmarks/results/core.json")
    record = next(r for r in records if r["network"] == network)
    bits = record["file_bits_per_weight"]
    return bits, bits * record["masked_weights"] / 8e6


def name_of(network: str) -> str:
    """What a network is called in print."""
    return NAMES.get(network, network.replace("resnet", "ResNet-"))


def span(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The smallest and the largest of some numbers.

    >>> span([1.358, 1.492]), span([2.0])
    ('1.36 to 1.49', '2.00')
    """
    ends = [form.format(end(list(values))) for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def measured_on(records: Iterable[dict[str, Any]]) -> str:
    """Hardware, version and date of records."""
    return "; ".join(dict.fromkeys(f"{r['hardware']}, torch {r['versions']['torch']}, {r['date']}" for r in records))
