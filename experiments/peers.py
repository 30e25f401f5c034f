"""Accuracy of other tools' 2:4 masks on the CIFAR-10 checkpoints without retraining, and what hardware can use.

    python experiments/peers.py ASSETS [--networks cifar_resnet20 ...] [--modes sparse_magnitude ...] [--device cpu]

ASSETS has the layout of one_shot.py. Needs `pip install nvidia-modelopt`. Writes experiments/results/peers.json.
"""

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.sparsity as mts
import torch
from torch import Tensor, nn

import halve
from halve.machine import device_name
from halve.sources.data import load_data
from halve.sources.models import load_model
from halve.sources.preprocessing import Preprocessing

RESULTS = Path(__file__).parent / "results" / "peers.json"
NETWORKS = {"cifar_resnet20": "cifar10_resnet20", "cifar_resnet56": "cifar10_resnet56"}
MODES = ("sparse_magnitude", "sparsegpt")
CALIBRATION_IMAGES = 2048


def sparsified(model: nn.Module, mode: str, images: list[Tensor]) -> nn.Module:
    """A copy of the model with ModelOpt's masks, as a plain module."""

    def calibrate(network: nn.Module) -> None:
        for batch in images:
            network(batch)

    config = {"forward_loop": calibrate} if mode == "sparsegpt" else {}
    return mts.export(mts.sparsify(model, mode, config))


def blocks(weight: Tensor, order: str) -> Tensor:
    """The weights of each block of four: along input channels, or as they lie in memory."""
    rows = weight.movedim(1, -1) if order == "channels" else weight
    return rows.reshape(-1, 4)


def is_2_4(weight: Tensor, order: str) -> bool:
    """Whether no block keeps more than two weights."""
    return bool(((blocks(weight, order) != 0).sum(1) <= 2).all())


def measure(network: str, mode: str, assets: Path, device: str) -> dict[str, Any]:
    """One record for one mode on one network."""
    spec, weights = f"{assets / 'zoo.py'}:{network}", assets / f"{NETWORKS[network]}.safetensors"
    dense, model = (load_model(spec, weights).model.to(device) for _ in range(2))
    source = load_data(
        *(str(assets / "cifar10/train"), Preprocessing()), batch_size=128, limit=CALIBRATION_IMAGES, shuffle=True
    )
    images = [batch[0].to(device) for batch in source.loader]
    started = time.perf_counter()
    sparse = sparsified(model, mode, images)
    seconds = time.perf_counter() - started
    test = load_data(str(assets / "cifar10/test"), Preprocessing(), batch_size=250)
    found = halve.evaluate(sparse, None, test.loader, classes=test.classes)
    pairs = [
        (before.weight.detach(), after.weight.detach())
        for (_, before), (_, after) in zip(dense.named_modules(), sparse.named_modules(), strict=True)
        if isinstance(before, nn.Conv2d | nn.Linear)
    ]
    masked = [(before, after) for before, after in pairs if bool((after == 0).any())]
    return {
        "network": network,
        "tool": "NVIDIA ModelOpt",
        "mode": mode,
        "calibration_images": CALIBRATION_IMAGES if mode == "sparsegpt" else 0,
        "images": found.images,
        "top1": found.top1,
        "masked_layers": len(masked),
        "along_input_channels": sum(is_2_4(after, "channels") for _, after in masked),
        "along_memory": sum(is_2_4(after, "flat") for _, after in masked),
        "kept_weights_changed": sum(bool((after != before)[after != 0].any()) for before, after in masked),
        "seconds": round(seconds, 1),
        "hardware": device_name(torch.device(device)),
        "date": datetime.date.today().isoformat(),
        "versions": {"halve": halve.__version__, "torch": torch.__version__, "modelopt": modelopt.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for network in options.networks:
        for mode in options.modes:
            record = measure(network, mode, options.assets, options.device)
            records = [r for r in records if (r["network"], r["mode"]) != (network, mode)] + [record]
            records.sort(key=lambda r: (list(NETWORKS).index(r["network"]), MODES.index(r["mode"])))
            RESULTS.write_text(json.dumps(records, indent=1) + "\n")
            print(record)


if __name__ == "__main__":
    main()
