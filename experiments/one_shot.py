"""Accuracy of one-shot masks on real checkpoints: all scores, some permuted, with and without recalibration.

    python experiments/one_shot.py ASSETS [--networks cifar_resnet20 ...] [--methods magnitude ...] [--device cpu]

ASSETS has the checkpoints and photos:
    zoo.py, cifar10_resnet20.safetensors, cifar10_resnet56.safetensors, resnet50_v1_imagenet.safetensors,
    cifar10/{train,test}/CLASS/*.png, in20_train/, in20_val_dev/, in1000_dev/ (WNID folders), imagenet_wnids.txt
Statistics are measured on training images only. Writes experiments/results/one_shot.json.
"""

import argparse
import datetime
import json
import time
from pathlib import Path

import torch
from rich.progress import track

import halve
from halve.machine import device_name
from halve.sources.data import load_data
from halve.sources.models import load_model
from halve.sources.preprocessing import Preprocessing

RESULTS = Path(__file__).parent / "results" / "one_shot.json"
NETWORKS = {
    "cifar_resnet20": ("cifar10_resnet20", "cifar10/train", {"CIFAR-10 test": "cifar10/test"}),
    "cifar_resnet56": ("cifar10_resnet56", "cifar10/train", {"CIFAR-10 test": "cifar10/test"}),
    "resnet50_v1": (
        "resnet50_v1_imagenet",
        "in20_train",
        {"500 ImageNet photos of 20 classes": "in20_val_dev", "500 ImageNet photos of 500 classes": "in1000_dev"},
    ),
}
CALIBRATION_IMAGES = {"cifar_resnet20": 2048, "cifar_resnet56": 2048, "resnet50_v1": 512}
METHODS = {  # score, permute
    "random": ("random", False),
    "magnitude": ("magnitude", False),
    "magnitude_permuted": ("magnitude", True),
    "wanda": ("wanda", False),
    "reconstruct": ("reconstruct", False),
    "reconstruct_permuted": ("reconstruct", True),
}


def measure(network: str, methods: list[str], assets: Path, device: str) -> list[dict[str, object]]:
    """Measure some methods on one network; returns one record per method and test set."""
    checkpoint, learn_from, tests = NETWORKS[network]
    model = load_model(f"{assets / 'zoo.py'}:{network}", assets / f"{checkpoint}.safetensors").model.to(device)
    limit = CALIBRATION_IMAGES[network]
    images = load_data(str(assets / learn_from), Preprocessing(), batch_size=128, limit=limit, shuffle=True).loader
    images = list(images)  # the same for all methods, and decoded once
    found = {}
    for method in track(methods, f"{network}: masks"):
        score, permute = METHODS[method]
        started = time.perf_counter()
        masks = halve.prune(model, score, images, permute=permute)
        found[method] = masks, time.perf_counter() - started
        if score == "reconstruct":  # chooses other masks if statistics will be recalibrated
            started = time.perf_counter()
            masks = halve.prune(model, score, images, permute=permute, recalibrate=True)
            found[f"{method}_recalibrated"] = masks, time.perf_counter() - started
        elif method != "random":
            found[f"{method}_recalibrated"] = halve.recalibrate(model, masks, images), time.perf_counter() - started
    records = []
    for where, folder in tests.items():
        wnids = assets / "imagenet_wnids.txt" if folder.startswith("in") else None
        data = load_data(str(assets / folder), Preprocessing(), batch_size=250, classes_file=wnids)
        for method, (masks, seconds) in track(found.items(), f"{network} on {where}"):
            result = halve.evaluate(model, masks, data.loader, classes=data.classes)
            records.append(
                {
                    "network": network,
                    "data": where,
                    "method": method,
                    "pattern": "2:4",
                    "images": result.images,
                    "calibration_images": limit,
                    "kept_magnitude": kept_magnitude(model, masks),
                    "top1": result.top1,
                    "agreement": result.agreement,
                    "dense_top1": result.dense_top1,
                    "seconds": round(seconds, 1),
                    "hardware": device_name(torch.device(device)),
                    "date": datetime.date.today().isoformat(),
                    "versions": {"halve": halve.__version__, "torch": torch.__version__},
                }
            )
    return records


def kept_magnitude(model: torch.nn.Module, masks: halve.MaskSet) -> float:
    """Share of the masked layers' total magnitude that is kept."""
    kept = total = 0.0
    for name, mask in masks.items():
        weight = model.get_submodule(name).weight.detach()
        kept, total = kept + float(mask.apply_to(weight).abs().sum()), total + float(weight.abs().sum())
    return kept / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    names = {f"{method}{ending}" for method in options.methods for ending in ("", "_recalibrated")}
    records = [r for r in old if r["network"] not in options.networks or r["method"] not in names]
    for network in options.networks:
        records += measure(network, options.methods, options.assets, options.device)
        records.sort(key=lambda r: (list(NETWORKS).index(r["network"]), r["data"]))
        RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    for record in records:
        row = (record["network"], record["data"], record["method"])
        shares = (record["kept_magnitude"], record["top1"], record["agreement"], record["seconds"])
        print("{:16} {:36} {:32}".format(*row), "{:.4f} {:.4f} {:.4f} {:.0f} s".format(*shares))


if __name__ == "__main__":
    main()
