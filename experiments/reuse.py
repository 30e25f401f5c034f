"""Masks after an update of the checkpoint: the old mask on new weights, and relearned from it in a tenth of the steps.

    PYTHONPATH=ASSETS python experiments/reuse.py ASSETS [--network cifar_resnet20] [--reduced] [--device cuda]

ASSETS has the layout of accuracy.py. A mask is learned once. Then the dense network is fine-tuned on its training
images in growing amounts, each going on from the one before, with all layers and BatchNorm statistics free. For each
update the test images compare, all on the new weights: the dense network, the old mask, magnitude, the old mask learned
again in a tenth of the steps, and a mask learned from scratch in as few. Mask and checkpoints are kept in --work, and
an update that is in the results already is not measured again. --reduced fits ten minutes of one CPU core. Writes
experiments/results/reuse.json.
"""

import argparse
import copy
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import NETWORKS, Pictures, load
from torch import nn

import halve
from halve.learn.augment import augmented
from halve.machine import device_name
from halve.sources.weights import load_weights_, save_state

RESULTS = Path(__file__).parent / "results" / "reuse.json"
FULL = {"steps": 3000, "batch": 256, "updates": [0, 30, 100, 300, 1000, 3000, 10000], "test_images": 10000}
REDUCED = {"steps": 500, "batch": 32, "updates": [0, 10, 50, 200, 800], "test_images": 2000}
SHARE = 10  # masks are learned again in a tenth of the steps
ARMS = {  # name -> options of halve.learn; True stands for the old mask
    "relearned": {"start": True},
    "fresh": {},
}
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4  # of fine-tuning


def fine_tune_(model: nn.Module, train: Pictures, steps: int, seed: int) -> None:
    """Train a model on, in place, with flipped and shifted images."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    random = torch.Generator(train.pixels.device).manual_seed(seed)
    done = 0
    while done < steps:
        for images, labels in train:
            if done == steps:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(augmented(images, random, mixed=False)), labels).backward()
            optimizer.step()
            done += 1
    model.eval()


def relative_change(old: nn.Module, new: nn.Module, masks: halve.MaskSet) -> float:
    """The norm of the update of all masked weights, relative to the norm of the weights."""
    change = size = 0.0
    for name in masks:
        before, after = (model.get_submodule(name).weight.detach().double() for model in (old, new))
        change, size = change + float((after - before).square().sum()), size + float(before.square().sum())
    return math.sqrt(change / size)


def measured(model: nn.Module, masks: halve.MaskSet, test: Pictures) -> dict[str, float]:
    result = halve.evaluate(model, masks, test, on_changed="ignore", progress=False)
    return {"top1": float(result.top1 or 0), "agreement": float(result.agreement or 0), "kl": float(result.kl or 0)}


def learned(model: nn.Module, train: Pictures, steps: int, seed: int, **options: Any) -> tuple[halve.MaskSet, float]:
    """Masks of so many steps, whatever they are worth, and the seconds that they took."""
    started = time.perf_counter()
    masks = halve.learn(model, train, steps=steps, seed=seed, validation=False, progress=True, **options)
    return masks, round(time.perf_counter() - started, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--network", default="cifar_resnet20", choices=list(NETWORKS))
    parser.add_argument("--reduced", action="store_true", help=f"{REDUCED} instead of {FULL}")
    parser.add_argument("--updates", nargs="+", type=int, help="steps of fine-tuning in all, in growing order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("reuse-out"), help="folder for the mask and the checkpoints")
    parser.add_argument("--note", default="", help="what else ran on the device at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    size = REDUCED if options.reduced else FULL
    kind = "reduced" if options.reduced else "full"
    network = NETWORKS[options.network]._replace(batch=size["batch"])
    everything = load(options.assets, network.train, network.size, network, options.device)
    test = load(options.assets, (next(iter(network.tests.values()))[0],), None, network, options.device)
    step = -(-len(test.labels) // size["test_images"])  # files are sorted by class
    test = test.part(torch.arange(0, len(test.labels), step, device=test.labels.device), None)

    def train() -> Pictures:
        return everything.part(torch.ones_like(everything.labels, dtype=torch.bool), options.seed)

    old = network.model(options.network, options.assets).to(options.device)
    options.work.mkdir(parents=True, exist_ok=True)
    stem = f"{options.network}.{kind}.{options.seed}"
    file = options.work / f"{stem}.masks.safetensors"
    if not file.exists():
        masks, seconds = learned(old, train(), size["steps"], options.seed)
        masks.with_recipe(reuse_seconds=seconds).save(file)
    masks = halve.load(file)
    records: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(r["network"], r["kind"], r["seed"], r["update_steps"]) for r in records}
    new, before = copy.deepcopy(old), 0
    for steps in sorted(options.updates or size["updates"]):
        checkpoint = options.work / f"{stem}.{steps}.safetensors"
        if checkpoint.exists():
            load_weights_(new, checkpoint)
        else:
            fine_tune_(new, train(), steps - before, options.seed + steps)
            save_state(new.state_dict(), checkpoint)
        before = steps
        if (options.network, kind, options.seed, steps) in done:
            continue
        few = size["steps"] // SHARE
        arms = {}
        for arm, own in ARMS.items():
            found, seconds = learned(
                new, train(), few, options.seed, **own | ({"start": masks} if "start" in own else {})
            )
            arms[arm] = measured(new, found, test) | {"steps": few, "seconds": seconds}
            if "start" in own:
                arms[arm]["changed_blocks"] = masks.difference(found)
        dense = halve.evaluate(new, halve.MaskSet({}), test, progress=False)
        records.append(
            {
                "network": options.network,
                "kind": kind,
                "seed": options.seed,
                "update_steps": steps,
                "relative_change": relative_change(old, new, masks),
                "test_images": len(test.labels),
                "mask_steps": size["steps"],
                "mask_seconds": masks.recipe["reuse_seconds"],
                "batch": size["batch"],
                "fine_tuning": {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
                "dense": {"top1": float(dense.top1 or 0)},
                "kept": measured(new, masks, test),
                "magnitude": measured(new, halve.prune(new), test),
                **arms,
                "hardware": device_name(torch.device(options.device)) + (f", {options.note}" if options.note else ""),
                "versions": {"halve": halve.__version__, "torch": torch.__version__},
                "date": datetime.date.today().isoformat(),
            }
        )
        shown = {key: round(100 * records[-1][key]["top1"], 2) for key in ("dense", "kept", *ARMS)}
        print(f"{steps} steps, change {100 * records[-1]['relative_change']:.2f} %: top-1 {shown}", flush=True)
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(records, indent=1) + "\n")  # after each, so that an interrupted run keeps it


if __name__ == "__main__":
    main()
