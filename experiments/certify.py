"""What can be certified on real networks, and how far attacks get: flips, regions, updates of the weights.

    python experiments/certify.py ASSETS MASKS --run digits_region_2 [--seconds 200]
    python experiments/certify.py ASSETS MASKS --list

ASSETS has the layout of one_shot.py. MASKS is a folder for the networks and masks that are made on first use: digits
and ResNet-20 with learned masks, ResNet-50 with the largest weights and recalibrated statistics. A run continues where
an earlier one stopped, image by image. Writes one record per run to experiments/results/certify.json.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halve
from halve.certify.attack import attack_input, attack_weights, margin_of
from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds, OutOfTime, proven_margin
from halve.certify.lemmas import norm
from halve.certify.network import Network, network_of
from halve.certify.operators import Layer, Linear
from halve.certify.region import box
from halve.certify.reuse import chosen, largest, weight_units
from halve.certify.rounding import Interval
from halve.masks.storage import write_atomically
from halve.sources.data import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, load_data
from halve.sources.digits import DigitsResNet, digits, train_digits
from halve.sources.models import load_model
from halve.sources.weights import save_state
from halve.version import VERSION

RESULTS = Path(__file__).parent / "results" / "certify.json"
LIMIT = 200.0  # seconds for an image
STAGE_3 = ("layer3.*", "linear")
LAST_BLOCK = ("layer4.2.*", "fc")


@dataclass(frozen=True)
class Run:
    """A statement about a network: `size` is eps in pixels, or u relative to the root mean square; None: the radius."""

    network: str
    statement: str
    size: float | None
    images: int
    layers: tuple[str, ...] | None = None
    method: str = "CROWN"


RUNS = {
    **{f"digits_region_{k}": Run("digits", "region", k / 255, 100) for k in (2, 4)},
    "digits_intervals_0.25": Run("digits", "region", 0.25 / 255, 100, None, "intervals"),
    "digits_region_radius": Run("digits", "region", None, 20),
    "digits_reuse_radius": Run("digits", "reuse", None, 20),
    **{f"resnet20_stage3_{u}": Run("cifar_resnet20", "reuse", u, 50, STAGE_3) for u in (1e-4, 1e-3)},
    "resnet20_all_1e-05": Run("cifar_resnet20", "reuse", 1e-5, 10),
    "resnet20_region_0.0625": Run("cifar_resnet20", "region", 0.0625 / 255, 10),
    **{f"resnet50_last_{u}": Run("resnet50_v1", "reuse", u, 20, LAST_BLOCK) for u in (1e-4, 1e-3)},
    **{
        f"{name}_lemma_4": Run(name, "lemma 4", None, 10, None, "norms")
        for name in ("digits", "cifar_resnet20", "resnet50_v1")
    },
    "resnet20_flips": Run("cifar_resnet20", "flips", None, 10_000, None, "exact binomial"),
    "resnet50_flips": Run("resnet50_v1", "flips", None, 1_000, None, "exact binomial"),
}


@dataclass(frozen=True)
class Subject:
    """A network with masks, and images to make statements about."""

    model: nn.Module
    masks: halve.MaskSet
    mask: str
    data: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]


def subject(name: str, assets: Path, made: Path, count: int) -> Subject:
    """Open a network, its masks and the first images of a random order; make what does not exist yet."""
    path = made / f"{name}.masks.safetensors"
    if name == "digits":
        return _digits(made, path)
    folder = "cifar10/test" if name == "cifar_resnet20" else "in1000_dev"
    checkpoint = "cifar10_resnet20" if name == "cifar_resnet20" else "resnet50_v1_imagenet"
    model = load_model(f"{assets / 'zoo.py'}:{name}", assets / f"{checkpoint}.safetensors").model.float().eval()
    size = {} if name == "cifar_resnet20" else {"size": 224, "resize": 232}
    preprocess = Preprocessing(**size)
    if not path.exists():
        _make(name, model, assets, preprocess).save(path)
    data = load_data(str(assets / folder), preprocess, batch_size=50, limit=count).loader
    mask = "learned, 2 minutes on one core" if name == "cifar_resnet20" else "magnitude, recalibrated"
    return Subject(model, halve.load(path), mask, data, IMAGENET_MEAN, IMAGENET_STD)


def _digits(made: Path, path: Path) -> Subject:
    weights = made / "digits.safetensors"
    if not weights.exists():
        save_state(train_digits().state_dict(), weights)
    model = DigitsResNet()
    model.load_state_dict(load_file(weights))
    if not path.exists():
        halve.learn(model, digits("train").tensors[0], minutes=1).save(path)
    images = digits("test").tensors[0]
    return Subject(model.eval(), halve.load(path), "learned, 1 minute on one core", images, (0.5,), (0.5,))


def _make(name: str, model: nn.Module, assets: Path, preprocess: Preprocessing) -> halve.MaskSet:
    if name == "cifar_resnet20":
        data = load_data(str(assets / "cifar10/train"), preprocess, batch_size=128, shuffle=True).loader
        return halve.learn(model, data, minutes=2)
    data = load_data(str(assets / "in20_train"), preprocess, batch_size=16, limit=128, shuffle=True).loader
    return halve.recalibrate(model, halve.prune(model), data)


class Prover:
    """Proves and attacks a statement, image by image."""

    def __init__(self, run: Run, subject: Subject) -> None:
        self.run, self.subject = run, subject
        masks = subject.masks
        masked = halve.restore_order(halve.apply(subject.model, masks), masks)
        self.models = {
            "masked": masked.double().eval(),
            "dense": halve.restore_order(subject.model, masks).double().eval(),
        }
        for model in self.models.values():
            model.requires_grad_(False)
        self.units = weight_units(self.models["dense"], masks, relative=True)
        self.networks: dict[str, Network] = {}

    def network(self, name: str, image: Tensor) -> Network:
        if name not in self.networks:
            self.networks[name] = network_of(self.models[name], image[None])
        return self.networks[name]

    def prove(self, image: Tensor) -> dict[str, Any]:
        """The outcome for an image."""
        with torch.no_grad():
            label = int(self.models["dense"](image[None])[0].argmax())
            nominal = {name: float(margin_of(model(image[None])[0], label)) for name, model in self.models.items()}
        if nominal["masked"] <= 0:
            return {"agree": False}
        started = time.perf_counter()
        if self.run.size is None:
            return {"agree": True} | self._radii(image, label) | {"seconds": time.perf_counter() - started}
        bounds = {}
        for name in ("masked", "dense") if self.run.statement == "region" else ("masked",):
            bounds[name] = self._bound(name, image, label, self.run.size)
            if bounds[name] is None or bounds[name] <= 0:
                break
        seconds = time.perf_counter() - started
        known = [bound for bound in bounds.values() if bound is not None]
        found = {name: self._attack(name, image, label, self.run.size) for name in bounds}
        certified = len(known) == len(bounds) and min(known) > 0
        if certified and min(found.values()) <= 0:
            raise SystemExit(f"a certified image was attacked successfully: {bounds}, {found}")
        last = list(bounds)[-1]
        gap, worst = nominal[last] - (bounds[last] or -float("inf")), nominal[last] - found[last]
        return {
            "agree": True,
            "certified": certified,
            "bound": None if bounds[last] is None else bounds[last],
            "found": found[last],
            "nominal": nominal[last],
            "tightness": gap / worst if worst > 0 and gap < 1e12 else None,
            "attacked": min(found.values()) <= 0,
            "seconds": seconds,
        }

    def _bound(self, name: str, image: Tensor, label: int, size: float) -> float | None:
        """A lower bound of the margin; None if it took too long."""
        network = self.network(name, image)
        near, changes = self._set(name, image, size)
        try:
            if self.run.method == "intervals":
                low, high = Bounds(network, near, changes, tighten=False).values[-1]
                return float(low[label] - torch.cat([high[:label], high[label + 1 :]]).max())
            return proven_margin(network, near, changes, label, True, LIMIT)[0]
        except OutOfTime:
            return None

    def _set(self, name: str, image: Tensor, size: float) -> tuple[Interval, dict[str, WeightBox]]:
        if self.run.statement == "region":
            return box(image, size, self.subject.mean, self.subject.std), {}
        layers = chosen(list(self.network(name, image).layers), self.run.layers)
        return Interval(image, image), {layer: WeightBox(size * self.units[name][layer]) for layer in layers}

    def _attack(self, name: str, image: Tensor, label: int, size: float) -> float:
        near, changes = self._set(name, image, size)
        if self.run.statement == "region":
            return attack_input(self.models[name], near, label)
        radii = {layer: change.radii for layer, change in changes.items()}
        return attack_weights(self.models[name], image, label, radii)

    def _radii(self, image: Tensor, label: int) -> dict[str, Any]:
        """The largest change that is certified, and the largest for which the attack fails."""
        region = self.run.statement == "region"
        names = ("masked", "dense") if region else ("masked",)
        first = 4 / 255 if region else 5e-3
        radius = largest(lambda u: all((self._bound(name, image, label, u) or -1) > 0 for name in names), first)
        kept = largest(lambda u: all(self._attack(name, image, label, u) > 0 for name in names), 3 * first)
        return {"certified": radius > 0, "radius": radius, "attack_radius": kept}


def flips(name: str, assets: Path, made: Path, count: int) -> dict[str, Any]:
    """The flips of a network over its test images."""
    one = subject(name, assets, made, count)
    data: Any = one.data
    if name == "resnet50_v1":
        more = load_data(str(assets / "in20_val_dev"), Preprocessing(224, 232), batch_size=50).loader
        data = [*data, *more]
    started = time.perf_counter()
    found = halve.certify(one.model, one.masks, data, confidence=0.999)
    seconds = time.perf_counter() - started
    keys = ("images", "same", "agreement", "share")
    return {key: found.result[key] for key in keys} | {"sentence": str(found), "seconds": seconds, "mask": one.mask}


def lemma_4(prover: Prover, image: Tensor) -> dict[str, Any]:
    """The telescoped sum of lemma 4 on the graph of a network, with norms of the layers, next to the margin."""
    label = int(prover.models["dense"](image[None])[0].argmax())
    margin = float(margin_of(prover.models["dense"](image[None])[0], label))
    values, change = [image], [0.0]
    pairs = zip(prover.network("masked", image).nodes[1:], prover.network("dense", image).nodes[1:], strict=True)
    for masked, dense in pairs:
        inputs = [values[i] for i in dense.inputs]
        assert dense.operator is not None
        assert masked.operator is not None
        values.append(dense.operator.value(inputs))
        total = sum(change[i] for i in dense.inputs)  # sums add up; ReLU and pooling do not increase it
        if isinstance(masked.operator, Layer) and isinstance(dense.operator, Layer):
            removed = norm(masked.operator.weight - dense.operator.weight) * float(inputs[0].abs().max())
            total = norm(masked.operator.weight) * total + removed
        elif isinstance(masked.operator, Linear) and masked.operator.terms:
            gain = float(masked.operator.apply_absolute(torch.ones_like(inputs[0])[None]).max())
            moved = float((masked.operator.value(inputs) - values[-1]).abs().max())  # recalibrated statistics
            total = gain * total + moved
        change.append(total)
    return {"agree": True, "bound": change[-1], "margin": margin}


def summary(run: Run, found: list[dict[str, Any]]) -> dict[str, Any]:
    """What is published of a run."""
    agree = [one for one in found if one["agree"]]
    if run.statement == "lemma 4":
        middle = {key: statistics.median(one[key] for one in agree) for key in ("bound", "margin")}
        return {"n": len(agree), "median_bound": middle["bound"], "median_margin": middle["margin"]}
    times = [one["seconds"] for one in agree]
    result: dict[str, Any] = {"n": len(agree), "disagree": len(found) - len(agree)}
    if not agree:
        return result
    result |= {
        "share_certified": sum(one["certified"] for one in agree) / len(agree),
        "seconds_per_image": statistics.mean(times),
    }
    if run.size is None:
        result["median_radius"] = statistics.median(one["radius"] for one in agree)
        result["median_attack_radius"] = statistics.median(one["attack_radius"] for one in agree)
    else:
        result["attack"] = sum(one["attacked"] for one in agree) / len(agree)
        tightness = [one["tightness"] for one in agree if one["tightness"] is not None]
        bounds = [one["bound"] for one in agree if one["bound"] is not None]
        result["tightness"] = statistics.median(tightness) if tightness else None
        result["median_bound"] = statistics.median(bounds) if bounds else None
        result["out_of_time"] = sum(one["bound"] is None for one in agree)
    return result


def images_of(data: Any) -> list[Tensor]:
    """Images in float64."""
    batches = [data] if isinstance(data, Tensor) else [batch[0] for batch in data]
    return [image.double() for batch in batches for image in batch]


def execute(name: str, assets: Path, made: Path, seconds: float, save: Callable[[dict[str, Any]], None]) -> None:
    """Continue a run until it is done or the time is up."""
    run, record = RUNS[name], load().get(name, {})
    if run.statement == "flips":
        save(_context(name, run) | flips(run.network, assets, made, run.images))
        return
    found = record.get("per_image", [])
    one = subject(run.network, assets, made, 2 * run.images)
    prover, started = Prover(run, one), time.perf_counter()
    for image in images_of(one.data)[len(found) :]:
        done = sum(outcome["agree"] for outcome in found)
        if done >= run.images or time.perf_counter() - started > seconds:
            break
        found.append(lemma_4(prover, image) if run.statement == "lemma 4" else prover.prove(image))
        save(_context(name, run) | {"mask": one.mask} | summary(run, found) | {"per_image": found})
        print(name, found[-1], flush=True)


def _context(name: str, run: Run) -> dict[str, Any]:
    unit = "pixels in 0..1" if run.statement == "region" else "of the layer's root mean square"
    about = {"run": name, "network": run.network, "statement": run.statement, "method": run.method, "size": run.size}
    about |= {"unit": None if run.statement == "flips" else unit, "layers": run.layers and list(run.layers)}
    versions = {"halve": VERSION, "torch": str(torch.__version__)}
    return about | {"threads": torch.get_num_threads(), "versions": versions, "date": str(datetime.date.today())}


def load() -> dict[str, dict[str, Any]]:
    """The records so far, by run."""
    return {record["run"]: record for record in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("assets", type=Path)
    parser.add_argument("masks", type=Path)
    parser.add_argument("--run", nargs="+", default=[], choices=RUNS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no image after this time")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print(*RUNS, sep="\n")
        sys.exit()
    torch.set_num_threads(1)

    def save(record: dict[str, Any]) -> None:
        records = load() | {record["run"]: record}
        ordered = [records[name] | {"method": run.method} for name, run in RUNS.items() if name in records]
        write_atomically(RESULTS, f"{json.dumps(ordered, indent=1)}\n".encode())  # runs may share the machine

    deadline = time.perf_counter() + arguments.seconds
    for name in arguments.run:
        execute(name, arguments.assets, arguments.masks, deadline - time.perf_counter(), save)


if __name__ == "__main__":
    main()
