"""The paper's tables on any image folders: dense, magnitude, magnitude permuted, the paper's recipe and `halve.learn`.

    python experiments/paper_tables.py --data IMAGENET [--networks resnet18 ...] [--loader dali]
    torchrun --nproc_per_node 8 experiments/paper_tables.py --data IMAGENET
    python experiments/paper_tables.py --train photos/train --val photos/val --size 160 --dense-epochs 60

The networks are ResNet-18, -34, -50, ConvNeXt-T and -S. IMAGENET has train/ and val/ with a folder for each class. The
dense networks are torchvision's checkpoints if there are 1,000 classes, those of --weights FOLDER
(NETWORK.safetensors), or trained first on the training images. Masks are learned from training images only, with
several budgets: by default 1 and 3 epochs, and a tenth of the dense network's, as in the paper's second table.

A run that was stopped continues where it was: checkpoints and states are kept in --work, and a measurement that is in
the results is not repeated. Under torchrun all processes train and learn together, and the first one measures. Images
are decoded once and kept on the device if there are at most --in-memory of them, otherwise read again in each epoch.
Writes experiments/results/paper_tables.json.
"""

import argparse
import copy
import datetime
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy import SETTINGS, Network, Pictures, masked_share, masks_by
from torch import nn
from torchvision import models
from torchvision import transforms as T
from training import Recipe, train_

import halve
from halve.errors import DataError
from halve.learn.distributed import Processes
from halve.machine import device_name
from halve.sources.data import load_data
from halve.sources.images import find_pictures
from halve.sources.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from halve.sources.weights import load_weights_, save_state

RESULTS = Path(__file__).parent / "results" / "paper_tables.json"
EPOCHS = {"resnet18": 90, "resnet34": 90, "resnet50": 90, "convnext_tiny": 300, "convnext_small": 300}  # of training
ONE_SHOT = ("dense", "magnitude", "magnitude_permuted")
LEARNED = ("paper", "paper_tuned", "halve")
KEY = ("network", "data", "method", "epochs", "seed")
HELD_OUT = 20  # every twentieth training image in memory is not learned from: masks are judged by these
Work = tuple[str, int | None, int | None]  # method, epochs, seed


@dataclass(frozen=True)
class Folders:
    """The images: batches to learn from, which of them judge masks, and those that measure."""

    train: Any
    validation: Any  # None: `halve.learn` holds images back
    val: Any
    classes: int
    name: str


def open_folders(options: argparse.Namespace, device: torch.device) -> Folders:
    """Open the training and validation images, in memory or to be read in each epoch."""
    sides = {"size": options.size, "resize": round(options.size * 256 / 224)}
    (pictures, names), (measured, others) = (find_pictures(str(folder)) for folder in (options.train, options.val))
    if not names or names != others:
        raise DataError(f"{options.train} and {options.val} must have the same class folders, two or more")
    what = f"{len(measured):,} images of {len(names):,} classes"
    name = options.name or (f"{what} (ImageNet)" if len(names) == 1000 else f"{what} ({options.val.name})")
    network = Network("", (), options.size, options.batch, {})
    val = in_memory(options.val, sides["size"], sides["resize"], network, options, device)
    if len(pictures) > options.in_memory:
        steps = [T.Resize(sides["resize"]), T.RandomCrop(options.size), T.ToTensor()]
        steps.append(T.Normalize(IMAGENET_MEAN, IMAGENET_STD))
        reading = {"batch_size": options.batch, "workers": options.workers, "loader": options.loader}
        train = load_data(str(options.train), T.Compose(steps), **reading, device=device, shuffle=True).loader
        return Folders(train, None, val, len(names), name)
    everything = in_memory(options.train, options.size, options.size, network, options, device)
    held = torch.arange(len(everything.labels), device=device) % HELD_OUT == 0
    return Folders(everything.part(~held, 0), everything.part(held, None), val, len(names), name)


def in_memory(
    folder: Path, size: int, resize: int, network: Network, options: argparse.Namespace, device: torch.device
) -> Pictures:
    """All images of a folder, resized and cropped, as bytes on the device."""
    pixels = T.Compose([T.Resize(resize), T.CenterCrop(size), T.PILToTensor()])
    loader = load_data(str(folder), pixels, batch_size=256, workers=options.workers).loader
    batches = [(images.to(device), labels.to(device)) for images, labels in loader]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return Pictures(images, labels, network)


def dense_network(
    name: str, folders: Folders, options: argparse.Namespace, processes: Processes, stop: Any
) -> tuple[nn.Module, dict[str, Any]] | None:
    """The dense network with what is known about it, on the device; None if there was no time to train it."""
    given = [options.weights / f"{name}{ending}" for ending in (".safetensors", ".pth") if options.weights]
    trained, about = (
        options.work / f"{name}.safetensors",
        {"epochs": epochs_of(name, options), "weights": "trained here"},
    )
    torch.manual_seed(0)
    if file := next((file for file in given if file.exists()), None):
        model = models.get_model(name, num_classes=folders.classes)
        load_weights_(model, file)
        about["weights"] = file.name
    elif folders.classes == 1000 and not options.train_dense:
        weights = models.get_model_weights(name).IMAGENET1K_V1
        model = models.get_model(name, weights=weights)
        reported = weights.meta["_metrics"]["ImageNet-1K"]
        about |= {"weights": str(weights), "reported": {"top1": reported["acc@1"], "top5": reported["acc@5"]}}
    else:
        model = models.get_model(name, num_classes=folders.classes)
        if processes.broadcast(trained.exists()):
            load_weights_(model, trained)
        else:
            model.to(processes.device, memory_format=torch.channels_last)
            recipe = Recipe.of(model, epochs_of(name, options))
            report = (lambda line: print(f"{name}, dense: {line}", flush=True)) if processes.is_main else str
            state = options.work / f"{name}.training"
            if not train_(
                *(model, folders.train, recipe, processes, state), batch=options.batch, report=report, stop=stop
            ):
                return None
            if processes.is_main:
                save_state(model.state_dict(), trained)
    model = model.to(processes.device, memory_format=torch.contiguous_format).eval()
    return model, about | {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def epochs_of(name: str, options: argparse.Namespace) -> int:
    """Epochs that the dense network is or was trained for."""
    return options.dense_epochs or EPOCHS[name]


def one_shot(model: nn.Module, method: str, folders: Folders, seconds: float) -> halve.MaskSet:
    """The masks of a method that does not learn, with as much time for channel orders as `halve.learn` has."""
    if method != "magnitude_permuted":
        return masks_by(model, method, folders.train, 0, {})
    return halve.prune(model, permute=True, permute_seconds=seconds, example=next(iter(folders.train))[0])


def learned(
    model: nn.Module, name: str, work: Work, folders: Folders, options: argparse.Namespace, processes: Processes
) -> halve.MaskSet:
    """The masks of a method that learns; a run that was stopped continues."""
    method, epochs, seed = work
    state = options.work / f"{name}.{method}.{epochs}.{seed}.learning.safetensors"
    own: dict[str, Any] = {"epochs": epochs, "run_state": state, "resume": processes.broadcast(state.exists())}
    own |= {"validation": folders.validation, "progress": processes.is_main}
    if method == "halve":
        own["permute_seconds"] = options.permute_seconds
    train = folders.train
    if isinstance(train, Pictures):
        train = Pictures(train.pixels, train.labels, train.network, seed)
    masks = masks_by(model, method, train, seed or 0, own)
    if processes.is_main:
        masks.save(options.work / f"{name}.{method}.{epochs}.{seed}.masks.safetensors", force=True)
        state.unlink(missing_ok=True)
    return masks


def record(
    model: nn.Module, name: str, work: Work, masks: halve.MaskSet, seconds: float, folders: Folders, about: Any
) -> dict[str, Any]:
    """What masks do to the network on the images that measure."""
    result = halve.evaluate(model, masks, folders.val)
    device = next(model.parameters()).device
    return {
        **dict(zip(KEY, (name, folders.name, *work), strict=True)),
        **{key: getattr(result, key) for key in ("top1", "top5", "agreement", "kl", "images")},
        "dense": about,
        "masked_share": round(masked_share(model, masks), 4),
        "seconds": round(seconds, 1),
        "settings": {key: masks.recipe[key] for key in SETTINGS if key in masks.recipe},
        "hardware": device_name(device),
        "versions": {"halve": halve.__version__, "torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
    }


def works(name: str, options: argparse.Namespace) -> list[Work]:
    """What is measured on a network."""
    budgets = options.epochs or sorted({1, 3, max(1, round(epochs_of(name, options) / 10))})
    one_shot: list[Work] = [(method, None, None) for method in ONE_SHOT if method in options.methods]
    return one_shot + [
        (method, epochs, seed)
        for method in LEARNED
        if method in options.methods
        for epochs in budgets
        for seed in options.seeds
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def write(path: Path, found: dict[str, Any]) -> None:
    """Add a record to the results, in a fixed order."""
    records = [r for r in read(path) if any(r[key] != found[key] for key in KEY)] + [found]
    order = [*ONE_SHOT, *LEARNED]
    records.sort(
        key=lambda r: (r["data"], list(EPOCHS).index(r["network"]), order.index(r["method"]), r["epochs"] or 0)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with train/ and val/")
    parser.add_argument("--train", type=Path, help="class folders to train on and to learn from")
    parser.add_argument("--val", type=Path, help="class folders to measure on")
    parser.add_argument("--name", help="what the images are called in the tables")
    parser.add_argument("--networks", nargs="+", default=list(EPOCHS), choices=list(EPOCHS))
    parser.add_argument("--methods", nargs="+", default=[*ONE_SHOT, *LEARNED], choices=[*ONE_SHOT, *LEARNED])
    parser.add_argument("--epochs", nargs="+", type=int, help="budgets (default: 1, 3 and a tenth of the dense epochs)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--weights", type=Path, help="folder of checkpoints")
    parser.add_argument("--train-dense", action="store_true", help="train the dense networks also with 1,000 classes")
    parser.add_argument("--dense-epochs", type=int, help=f"epochs of that (default: {EPOCHS})")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--batch", type=int, default=128, help="images per step and process")
    parser.add_argument("--permute-seconds", type=float, default=30.0, help="of halve.learn's search")
    parser.add_argument("--in-memory", type=int, default=200_000, help="most images that are kept on the device")
    parser.add_argument("--loader", default="pillow", choices=("pillow", "dali"))
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, help="start nothing new after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("paper-out"), help="folder for checkpoints, masks and states")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.train, options.val = (
        given or (options.data and options.data / part)
        for given, part in ((options.train, "train"), (options.val, "val"))
    )
    if options.train is None or options.val is None:
        parser.error("pass --data, or --train and --val")
    started = time.perf_counter()
    if options.device == "cuda":
        options.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(options.device)
    processes = Processes(torch.device(options.device))
    options.work.mkdir(parents=True, exist_ok=True)

    def late() -> bool:
        return options.seconds is not None and time.perf_counter() - started > options.seconds

    folders = open_folders(options, processes.device)
    if processes.is_main:
        print(f"{folders.name}: opened in {time.perf_counter() - started:.0f} s", flush=True)
    for name in options.networks:
        done = processes.broadcast({tuple(r[key] for key in KEY) for r in read(options.out)})
        left = [work for work in works(name, options) if (name, folders.name, *work) not in done]
        if not left or processes.broadcast(late()):
            continue
        found = dense_network(name, folders, options, processes, late)
        if found is None:
            continue
        model, about = found
        before = copy.deepcopy(model.state_dict())
        for work in left:
            if processes.broadcast(late()):
                break
            begun, masks = time.perf_counter(), halve.MaskSet({})
            if work[0] in LEARNED:
                masks = learned(model, name, work, folders, options, processes)
            elif processes.is_main:
                masks = one_shot(model, work[0], folders, options.permute_seconds)
            if not processes.is_main:
                continue
            seconds = time.perf_counter() - begun
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            assert not len(masks) or halve.verify(halve.apply(model, masks), masks).ok
            row = record(model, name, work, masks, seconds, folders, about)
            row["hardware"] = f"{processes.count} x {row['hardware']}" if processes.count > 1 else row["hardware"]
            write(options.out, row)
            known = {"top-1": row["top1"], "top-5": row["top5"]}  # no top-5 of fewer than six classes
            shown = ", ".join(f"{key} {100 * value:.2f}" for key, value in known.items() if value is not None)
            print(f"{name}, {work[0]}, {work[1] or 'no'} epochs: {shown}, {row['seconds']:.0f} s", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
