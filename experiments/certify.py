"""What can be certified on real networks, and how far attacks get: flips, regions, updates of the weights.

    python experiments/certify.py SUBJECTS --prepare ASSETS                # once: networks, masks and images
    python experiments/certify.py SUBJECTS --run digits_region_2 [--processes 16 | --device cuda] [--seconds 500]
    python experiments/certify.py SUBJECTS --run digits_region_2 --attack  # afterwards
    python experiments/certify.py --merge FILE                             # records of another machine
    python experiments/certify.py --list

SUBJECTS is a folder that --prepare fills: networks, their masks and test images in random order. ASSETS has the layout
of one_shot.py, with tiny200_train/ for the flips of ResNet-50. Digits and ResNet-20 get learned masks, ResNet-50 keeps
the largest weights, with recalibrated statistics; where its flips are counted, on all photos, only in the last stage,
recalibrated on photos that are not counted. A run continues where an earlier one with the same masks and bounds
stopped, on the same device and with the same limits: all images of a record share its conditions. It writes its record
after every image, or every few that are taken together on a GPU, to --out, by default experiments/results/certify.json.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve.certify.attack import attack_agreement, attack_input, attack_lead, attack_weights, margin_of
from halve.certify.changes import WeightBox
from halve.certify.crown import STEPS_INSIDE, Bounds, OutOfTime
from halve.certify.digests import digest_of_bounds, digest_of_masks
from halve.certify.joint import proven_lead, shared_updates
from halve.certify.lemmas import norm
from halve.certify.margins import Margin, proven_margins
from halve.certify.network import Network, network_of
from halve.certify.operators import Layer, Linear
from halve.certify.proofs import at_once
from halve.certify.region import box
from halve.certify.reuse import PRECISION, chosen, largest, weight_units
from halve.certify.rounding import Interval
from halve.masks.storage import write_atomically
from halve.sources.data import load_data
from halve.sources.digits import DigitsResNet, digits, train_digits
from halve.sources.models import load_model
from halve.sources.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from halve.sources.weights import save_state
from halve.version import VERSION

RESULTS = Path(__file__).parent / "results" / "certify.json"
STAGE_3 = ("layer3.*", "linear")
LAST_BLOCK = ("layer4.2.*", "fc")


@dataclass(frozen=True)
class Run:
    """A statement about a network.

    Args:
        size: eps in pixels, or u relative to the root mean square. None: the radius.
        gap: Slopes inside the network are optimised where the bound is at most this share of the margin below 0.
    """

    network: str
    statement: str
    size: float | None
    images: int
    layers: tuple[str, ...] | None = None
    method: str = "CROWN"
    branches: int = 0
    gap: float = math.inf


RUNS = {
    **{f"digits_region_{k}": Run("digits", "region", k / 255, 100, branches=1000) for k in (2, 4, 8)},
    "digits_intervals_0.25": Run("digits", "region", 0.25 / 255, 100, None, "intervals"),
    "digits_region_radius": Run("digits", "region", None, 50),
    "digits_reuse_radius": Run("digits", "reuse", None, 50),
    **{f"resnet20_stage3_{u}": Run("cifar_resnet20", "reuse", u, 50, STAGE_3) for u in (1e-4, 1e-3, 3e-3)},
    **{f"resnet20_all_{u}": Run("cifar_resnet20", "reuse", u, 10) for u in (1e-5, 1e-4)},
    **{f"resnet20_region_{k}": Run("cifar_resnet20", "region", k / 255, 20, gap=0.25) for k in (0.0625, 0.125, 0.25)},
    **{f"resnet50_last_{u}": Run("resnet50_v1", "reuse", u, 20, LAST_BLOCK) for u in (1e-4, 1e-3)},
    **{
        f"{name}_lemma_4": Run(name, "lemma 4", None, 10, None, "norms")
        for name in ("digits", "cifar_resnet20", "resnet50_v1")
    },
    "digits_agreement": Run("digits", "agreement", None, 50, None, "attack"),
    **{f"digits_agreement_{u}": Run("digits", "joint agreement", u, 12) for u in (1e-3, 3e-3, 6e-3)},
    **{f"resnet20_agreement_{u}": Run("cifar_resnet20", "joint agreement", u, 4, STAGE_3) for u in (3e-4, 1e-3)},
    "resnet20_flips": Run("cifar_resnet20", "flips", None, 10_000, None, "exact binomial"),
    "resnet50_flips": Run("resnet50_v1", "flips", None, 7_400, None, "exact binomial"),
    "resnet50_flips_learned": Run("resnet50_v1", "flips", None, 7_400, None, "exact binomial"),
}
MASKS = {"digits": "learned, 1 minute on one core", "cifar_resnet20": "learned, 5 minutes on one core"}
MASKS["resnet50_v1"] = "magnitude, recalibrated"
FLIPPED = {
    "resnet50_flips": "magnitude in the last stage, recalibrated on other photos (tiny200_train)",
    "resnet50_flips_learned": "last stage: learned from other photos, 40 minutes on one core",
}
CHECKPOINTS = {"cifar_resnet20": "cifar10_resnet20", "resnet50_v1": "resnet50_v1_imagenet"}
PREPROCESSING = {"cifar_resnet20": Preprocessing(), "resnet50_v1": Preprocessing(size=224, resize=232)}
TESTS = {"cifar_resnet20": ("cifar10/test",), "resnet50_v1": ("in20_train", "in20_val_dev", "in1000_dev")}
IMAGES = {"digits": 500, "cifar_resnet20": 150, "resnet50_v1": 40}


@dataclass(frozen=True)
class Subject:
    """A network with masks, and images to make statements about."""

    model: nn.Module
    masks: halve.MaskSet
    images: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]


def prepare(name: str, assets: Path, folder: Path) -> None:
    """Write what `subject` reads: weights, masks and images; what exists stays."""
    weights, masks, images = (folder / f"{name}.{end}" for end in ("safetensors", "masks.safetensors", "images"))
    folder.mkdir(parents=True, exist_ok=True)
    if name == "digits":
        if not weights.exists():
            save_state(train_digits().state_dict(), weights)
        if not masks.exists():
            halve.learn(_model(name, folder), digits("train").tensors[0], minutes=1).save(masks)
        save_file({"images": digits("test").tensors[0][: IMAGES[name]].contiguous()}, images)
        return
    weights.write_bytes((assets / f"{CHECKPOINTS[name]}.safetensors").read_bytes())
    (folder / "zoo.py").write_bytes((assets / "zoo.py").read_bytes())
    if not masks.exists():
        _masks(name, _model(name, folder), assets).save(masks)
    data = load_data(
        str(assets / TESTS[name][-1]), PREPROCESSING[name], batch_size=50, shuffle=True, limit=IMAGES[name]
    )
    save_file({"images": torch.cat([batch[0] for batch in data.loader])}, images)


def _model(name: str, folder: Path) -> nn.Module:
    if name == "digits":
        model: nn.Module = DigitsResNet()
        model.load_state_dict(load_file(folder / "digits.safetensors"))
        return model.eval()
    return load_model(f"{folder / 'zoo.py'}:{name}", folder / f"{name}.safetensors").model.float().eval()


def _masks(name: str, model: nn.Module, assets: Path) -> halve.MaskSet:
    if name == "cifar_resnet20":
        data = load_data(str(assets / "cifar10/train"), PREPROCESSING[name], batch_size=128, shuffle=True).loader
        return halve.learn(model, data, minutes=5)
    data = load_data(str(assets / "in20_train"), PREPROCESSING[name], batch_size=16, limit=128, shuffle=True).loader
    return halve.recalibrate(model, halve.prune(model), data)


def subject(name: str, folder: Path) -> Subject:
    """Open a network, its masks and its images."""
    mean, std = ((0.5,), (0.5,)) if name == "digits" else (IMAGENET_MEAN, IMAGENET_STD)
    images = load_file(folder / f"{name}.images")["images"]
    return Subject(_model(name, folder), halve.load(folder / f"{name}.masks.safetensors"), images, mean, std)


class Prover:
    """Proves a statement for images, and attacks it."""

    def __init__(self, run: Run, subject: Subject, device: str, limit: float) -> None:
        self.run, self.subject, self.device, self.limit = run, subject, device, limit
        masks = subject.masks
        masked = halve.restore_order(halve.apply(subject.model, masks), masks)
        self.models = {"masked": masked, "dense": halve.restore_order(subject.model, masks)}
        for model in self.models.values():
            model.double().eval().to(device).requires_grad_(False)
        self.units = weight_units(self.models["dense"], masks, relative=True)
        self.networks: dict[str, Network] = {}

    def network(self, name: str) -> Network:
        if name not in self.networks:
            self.networks[name] = network_of(self.models[name], self.subject.images[:1])
        return self.networks[name]

    @torch.no_grad()
    def agree(self) -> list[bool]:
        """Whether the two networks predict the same class, for each image."""
        found: list[bool] = []
        for some in self.subject.images.double().split(10):
            classes = [model(some.to(self.device)).argmax(1) for model in self.models.values()]
            found += (classes[0] == classes[1]).tolist()
        return found

    def prove(self, images: Tensor) -> list[dict[str, Any]]:
        """The outcome for each of some images."""
        with torch.no_grad():
            scores = {name: model(images) for name, model in self.models.items()}
        labels = scores["dense"].argmax(1).tolist()
        nominal = {name: [float(margin_of(*one)) for one in zip(s, labels, strict=True)] for name, s in scores.items()}
        agree = [i for i, margin in enumerate(nominal["masked"]) if margin > 0]
        found: list[dict[str, Any]] = [{"agree": i in agree, "label": label} for i, label in enumerate(labels)]
        if not agree:
            return found
        started, some, classes = time.perf_counter(), images[agree], [labels[i] for i in agree]
        outcomes = self._radii(some, classes) if self.run.size is None else self._margins(some, classes)
        seconds = (time.perf_counter() - started) / len(agree)
        for i, outcome in zip(agree, outcomes, strict=True):
            margins = {name: margin[i] for name, margin in nominal.items()}
            found[i] |= outcome | {"nominal": margins, "seconds": seconds}
        return found

    def _margins(self, images: Tensor, labels: list[int]) -> list[dict[str, Any]]:
        assert self.run.size is not None
        bounds: list[dict[str, float | None]] = [{} for _ in labels]
        for name in self.names:
            left = [i for i, one in enumerate(bounds) if all(bound and bound > 0 for bound in one.values())]
            if left:
                found = self._bounds(name, images[left], [labels[i] for i in left], [self.run.size] * len(left))
                for i, bound in zip(left, found, strict=True):
                    bounds[i][name] = bound
        return [
            {"certified": all(bound is not None and bound > 0 for bound in one.values()), "bounds": one}
            for one in bounds
        ]

    @property
    def names(self) -> tuple[str, ...]:
        return ("dense", "masked") if self.run.statement == "region" else ("masked",)  # the harder one first

    def _bounds(self, name: str, images: Tensor, labels: list[int], sizes: Sequence[float]) -> list[float | None]:
        """Lower bounds of the margins; None if they took too long."""
        near, changes = self._set(name, images, sizes)
        try:
            if self.run.method == "intervals":
                low, high = Bounds(self.network(name), near, changes, tighten=False).values[-1]
                return [
                    float(a[label] - torch.cat([b[:label], b[label + 1 :]]).max())
                    for a, b, label in zip(low, high, labels, strict=True)
                ]
            if math.isfinite(self.run.gap):
                return self._promising(name, near, changes, labels)
            found: list[Margin] = proven_margins(
                self.network(name), near, changes, labels, True, self.run.branches, self.limit
            )
            return [one.bound for one in found]
        except OutOfTime:
            return [None] * len(labels)

    def _promising(
        self, name: str, near: Interval, changes: dict[str, WeightBox], labels: list[int]
    ) -> list[float | None]:
        """Like `proven_margins`, but slopes inside are optimised only where a proof is within reach."""
        network, started = self.network(name), time.monotonic()
        plain = Bounds(network, near, changes, seconds=self.limit)
        found = plain.margins(labels, optimise=True)
        nominal = Bounds(network, Interval(near.center, near.center), tighten=False).margins(labels)
        left = [
            i for i, (bound, most) in enumerate(zip(found, nominal, strict=True)) if 0 >= bound > -self.run.gap * most
        ]
        if left and not bool(plain.overflow[left].any()):
            some = {layer: change.only(torch.tensor(left, device=near.low.device)) for layer, change in changes.items()}
            known = [Interval(x.low[left], x.high[left]) for x in plain.values]
            rest = self.limit - (time.monotonic() - started)
            bounds = Bounds(network, known[0], some, True, STEPS_INSIDE, known, seconds=rest)
            for i, bound in zip(left, bounds.margins([labels[i] for i in left], optimise=True), strict=True):
                found[i] = max(found[i], bound)
        return list(found)

    def _set(self, name: str, images: Tensor, sizes: Sequence[float]) -> tuple[Interval, dict[str, WeightBox]]:
        if self.run.statement == "region":
            near = [box(x[None], u, self.subject.mean, self.subject.std) for x, u in zip(images, sizes, strict=True)]
            return Interval(torch.cat([one.low for one in near]), torch.cat([one.high for one in near])), {}
        layers = chosen(list(self.network(name).layers), self.run.layers)
        scale = images.new_tensor(sizes)
        return Interval(images, images), {layer: WeightBox(self.units[name][layer], scale) for layer in layers}

    def _radii(self, images: Tensor, labels: list[int]) -> list[dict[str, Any]]:
        """The largest changes that are certified."""

        def hold(which: Sequence[int], sizes: Sequence[float]) -> list[bool]:
            good = dict(zip(which, sizes, strict=True))
            for name in self.names:
                left = list(good)
                if left:
                    bounds = self._bounds(name, images[left], [labels[i] for i in left], list(good.values()))
                    good = {i: good[i] for i, bound in zip(left, bounds, strict=True) if bound and bound > 0}
            return [i in good for i in which]

        first = 4 / 255 if self.run.statement == "region" else 5e-3
        radii = largest(hold, [first] * len(labels))
        return [{"certified": radius > 0, "radius": radius} for radius in radii]

    def attack(self, image: Tensor, one: dict[str, Any]) -> dict[str, Any]:
        """What an attack finds for an image whose outcome is known: the smallest margin, or the largest change."""
        label = one["label"]
        if self.run.size is None:
            first = one["radius"] or 1e-3

            def hold(which: Sequence[int], sizes: Sequence[float]) -> list[bool]:
                return [all(self._attack(name, image, label, u) > 0 for name in self.names) for u in sizes]

            [kept] = largest(hold, [3 * first])
            if kept < one["radius"]:
                raise SystemExit(f"a certified image was attacked successfully: {one}, {kept}")
            return {"attack_radius": kept}
        found = {name: self._attack(name, image, label, self.run.size) for name in one["bounds"]}
        wrong = {name for name, bound in one["bounds"].items() if bound is not None and bound > found[name]}
        if wrong or (one["certified"] and min(found.values()) <= 0):
            raise SystemExit(f"a certified image was attacked successfully: {one}, {found}")
        last = list(found)[-1]
        bound, nominal = one["bounds"][last], one["nominal"][last]
        worst = nominal - found[last]
        known = bound is not None and worst > 0 and nominal - bound < 1e12
        tightness = (nominal - bound) / worst if known else None
        return {"found": found, "tightness": tightness, "attacked": min(found.values()) <= 0}

    def _attack(self, name: str, image: Tensor, label: int, size: float) -> float:
        near, changes = self._set(name, image[None], [size])
        if self.run.statement == "region":
            return attack_input(self.models[name], near, label)
        radii = {layer: size * change.radii for layer, change in changes.items()}
        return attack_weights(self.models[name], image, label, radii)


def flips(name: str, assets: Path, folder: Path) -> tuple[halve.MaskSet, dict[str, Any]]:
    """The masks and the flips of a network over its test images: none of them was seen when the masks were made."""
    network = RUNS[name].network
    checkpoint = assets / f"{CHECKPOINTS[network]}.safetensors"
    model = load_model(f"{assets / 'zoo.py'}:{network}", checkpoint).model.float().eval()
    file = folder / f"{name if name in FLIPPED else network}.masks.safetensors"
    if not file.exists():
        _last_stage(name, model, assets).save(file)
    masks = halve.load(file)
    tests = [load_data(str(assets / test), PREPROCESSING[network], batch_size=50).loader for test in TESTS[network]]
    started = time.perf_counter()
    found = halve.certify(model, masks, itertools.chain(*tests), confidence=0.999)
    seconds = time.perf_counter() - started
    keys = ("images", "same", "agreement", "share")
    about = {"data": list(TESTS[network]), "masked_layers": len(masks), "sentence": str(found), "seconds": seconds}
    return masks, {key: found.result[key] for key in keys} | about


class LastStage(nn.Module):
    """The last stage of ResNet-50 and its head, under the names that they have in the network."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layer4, self.avgpool, self.fc = model.layer4, model.avgpool, model.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(self.layer4(x)).flatten(1))  # type: ignore[no-any-return]


def _last_stage(name: str, model: Any, assets: Path) -> halve.MaskSet:
    """Masks of the last stage of ResNet-50, found on tiny200_train without the class that shares photos with a test."""
    limit = 4096 if "learned" in name else 576
    preprocessing, batch = PREPROCESSING["resnet50_v1"], 64
    data = load_data(str(assets / "tiny200_train"), preprocessing, batch_size=batch, limit=limit, shuffle=True)
    counted = {folder.name for folder in (assets / "in20_train").iterdir()}
    other = torch.tensor([one not in counted for one in data.class_names])
    images = (batch[other[labels]] for batch, labels in data.loader)
    if "learned" not in name:
        return halve.recalibrate(model, halve.prune(model, include=["layer4.*"]), list(images))
    trunk = nn.Sequential(*list(model.children())[:-3])  # it is not masked: run once
    with torch.no_grad():
        inputs = torch.cat([trunk(some) for some in images])
    loader = DataLoader(TensorDataset(inputs), batch_size=batch, shuffle=True, drop_last=True)
    masks = halve.learn(LastStage(model).eval(), loader, minutes=40, augment=False, permute=False)
    print(masks.recipe["quality"], flush=True)
    return masks


def lemma_4(prover: Prover, image: Tensor) -> dict[str, Any]:
    """The telescoped sum of lemma 4 on the graph of a network, with norms of the layers, next to the margin."""
    scores = prover.models["dense"](image[None])[0]
    margin = float(margin_of(scores, int(scores.argmax())))
    values, change = [image[None]], [0.0]
    pairs = zip(prover.network("masked").nodes[1:], prover.network("dense").nodes[1:], strict=True)
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
            gain = float(masked.operator.apply_absolute(torch.ones_like(inputs[0])).max())
            moved = float((masked.operator.value(inputs) - values[-1]).abs().max())  # recalibrated statistics
            total = gain * total + moved
        change.append(total)
    return {"agree": True, "bound": change[-1], "margin": margin}


def agreement(prover: Prover, image: Tensor) -> dict[str, Any]:
    """The largest update for which an attack flips neither network, and whether they differ after one just above it."""
    masked, dense = prover.models["masked"], prover.models["dense"]
    if int(masked(image[None]).argmax()) != int(dense(image[None]).argmax()):
        return {"agree": False}

    def attacked(u: float) -> tuple[bool, bool]:
        radii = {name: u * unit for name, unit in prover.units["dense"].items()}
        return attack_agreement(masked, dense, image, radii, prover.subject.masks)

    [kept] = largest(lambda which, sizes: [not attacked(u)[0] for u in sizes], [1e-2])
    return {"agree": True, "radius": kept, "differ": attacked(kept * (1 + PRECISION))[1]}


def joint_agreement(prover: Prover, image: Tensor) -> dict[str, Any]:
    """Whether both networks are proven to keep the class after the same update, or to agree, and what attacks find.

    The bounds of both together are found for all images, also where the class is kept, to compare what they prove.
    """
    masked, dense, size = prover.models["masked"], prover.models["dense"], prover.run.size
    assert size is not None
    scores = dense(image[None])[0]
    label = int(scores.argmax())
    if int(masked(image[None]).argmax()) != label:
        return {"agree": False}
    started, layers = time.perf_counter(), chosen(list(prover.network("dense").layers), prover.run.layers)
    bounds: dict[str, float | None] = {}
    for name in ("dense", "masked"):  # the harder one first
        [bounds[name]] = prover._bounds(name, image[None], [label], [size])
        if not (bounds[name] or 0.0) > 0:
            break
    changes = shared_updates(prover.network("masked"), prover.subject.masks, prover.units["dense"], layers, size)
    lead = proven_lead((prover.network("dense"), prover.network("masked")), image, changes, label, True).bound
    seconds = time.perf_counter() - started
    radii = {name: size * prover.units["dense"][name] for name in layers}
    found = attack_lead(masked, dense, image, radii, prover.subject.masks)
    if found is not None and (found > lead or all((bound or 0.0) > 0 for bound in bounds.values())):
        raise SystemExit(f"bounds were attacked successfully: {bounds}, {lead}, {found}")
    result = {"agree": True, "bounds": bounds, "keeps": all((bound or 0.0) > 0 for bound in bounds.values())}
    result |= {"joint": lead < 0, "lead": max(lead, 0.0), "margin": float(margin_of(scores, label))}
    return result | {"attack_lead": found, "seconds": seconds}


def _joint_summary(agree: list[dict[str, Any]]) -> dict[str, Any]:
    open_ = [one for one in agree if not one["keeps"] and not one["joint"]]
    result: dict[str, Any] = {"n": len(agree), "keeps": sum(one["keeps"] for one in agree)}
    result |= {"only_joint": sum(one["joint"] and not one["keeps"] for one in agree), "open": len(open_)}
    result |= {key: statistics.median(one[key] for one in open_) if open_ else None for key in ("lead", "margin")}
    result["differ"] = sum(one["attack_lead"] is not None for one in agree)
    return result | {"seconds_per_image": statistics.mean(one["seconds"] for one in agree)}


def summary(run: Run, found: list[dict[str, Any]]) -> dict[str, Any]:
    """What is published of a run."""
    agree = [one for one in found if one["agree"]]
    if run.statement in ALONE and not agree:
        return {"n": 0}
    if run.statement == "lemma 4":
        middle = {key: statistics.median(one[key] for one in agree) for key in ("bound", "margin")}
        return {"n": len(agree), "median_bound": middle["bound"], "median_margin": middle["margin"]}
    if run.statement == "joint agreement":
        return _joint_summary(agree)
    if run.statement == "agreement":
        radius = statistics.median(one["radius"] for one in agree)
        return {"n": len(agree), "median_attack_radius": radius, "differ": sum(one["differ"] for one in agree)}
    times = [one["seconds"] for one in agree]
    result: dict[str, Any] = {"n": len(agree), "disagree": len(found) - len(agree)}
    if not agree:
        return result
    result |= {
        "share_certified": sum(one["certified"] for one in agree) / len(agree),
        "seconds_per_image": statistics.mean(times),
    }
    attacked = [one for one in agree if "attacked" in one or "attack_radius" in one]
    result["attacks"] = len(attacked)
    if run.size is None:
        result["median_radius"] = statistics.median(one["radius"] for one in agree)
        radii = [one["attack_radius"] for one in attacked]
        result["median_attack_radius"] = statistics.median(radii) if radii else None
    else:
        result["attack"] = sum(one["attacked"] for one in attacked) / len(attacked) if attacked else None
        tightness = [one["tightness"] for one in attacked if one["tightness"] is not None]
        bounds = [bound for one in agree for bound in [list(one["bounds"].values())[-1]] if bound is not None]
        result["tightness"] = statistics.median(tightness) if tightness else None
        result["median_bound"] = statistics.median(bounds) if bounds else None
        result["out_of_time"] = sum(None in one["bounds"].values() for one in agree)
    return result


ALONE = {"lemma 4": lemma_4, "agreement": agreement, "joint agreement": joint_agreement}  # image by image


class Records:
    """The records of all runs, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, dict[str, Any]]:
        """The records so far, by run."""
        return {one["run"]: one for one in json.loads(self._path.read_text())} if self._path.exists() else {}

    def save(self, record: dict[str, Any]) -> None:
        """Write a record; the others stay."""
        records = self.load() | {record["run"]: record}
        ordered = [records[name] for name in RUNS if name in records]
        write_atomically(self._path, f"{json.dumps(ordered, indent=1)}\n".encode())

    def merge(self, others: dict[str, dict[str, Any]]) -> None:
        """Take records from elsewhere: images join those of the same masks and bounds; other records are replaced.

        If the conditions of some images differ, nothing is taken.
        """
        known = self.load()
        joined = {name for name, one in others.items() if "per_image" in one and _same(known.get(name, {}), one)}
        for name in joined:
            refuse_other_conditions(name, known[name], others[name])
        for name, record in others.items():
            if name in joined:
                mine = known[name]
                found = {one["index"]: one for one in (*mine["per_image"], *record["per_image"])}
                images = [found[index] for index in sorted(found)]
                record |= summary(RUNS[name], images) | {"per_image": images}
            self.save(record)


SAME = ("masks", "bounds")  # what a run shares with an earlier one that is not outdated
CONDITIONS = ("method", "branches", "gap", "size", "layers", "image_seconds", "device")  # one record states one of each


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records have the same masks and bounds. Old records do not say which they have."""
    return all(key in other and one.get(key) == other[key] for key in SAME)


def refuse_other_conditions(name: str, known: dict[str, Any], new: dict[str, Any]) -> None:
    """Exit if images of two records cannot be in one: its conditions and its mean time must hold for all of them."""
    told = [
        f"{key} {_stated(known, key)}, not {_stated(new, key)}"
        for key in CONDITIONS
        if _stated(known, key) != _stated(new, key)
    ]
    if told:
        raise SystemExit(
            f"{name} is recorded with {'; '.join(told)}. Images under other conditions need a record of their own: "
            f"choose another file with --out, or remove the record of {name} to start anew"
        )


def _stated(record: dict[str, Any], key: str) -> str:
    """What a record says of a condition. Old records do not say all, so that they are not continued."""
    return repr(record[key]) if key in record else "unknown"


@dataclass(frozen=True)
class Task:
    """Some images of a run, to be proven or attacked, possibly in another process."""

    name: str
    folder: Path
    device: str
    limit: float
    images: tuple[int, ...]
    attacked: dict[str, Any] | None = None

    def outcomes(self) -> list[dict[str, Any]]:
        """The outcome for each image; for an attack, the one that is known with what the attack found."""
        prover = _prover(self.name, self.folder, self.device, self.limit)
        images = prover.subject.images[list(self.images)].double().to(self.device)
        if self.attacked is not None:
            return [self.attacked | prover.attack(images[0], self.attacked)]
        alone = ALONE.get(prover.run.statement)
        found = prover.prove(images) if alone is None else [alone(prover, image) for image in images]
        return [{"index": index} | outcome for index, outcome in zip(self.images, found, strict=True)]


@functools.cache
def _prover(name: str, folder: Path, device: str, limit: float) -> Prover:
    return Prover(RUNS[name], subject(RUNS[name].network, folder), device, limit)


def _outcomes(task: Task) -> tuple[Task, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    return task, task.outcomes()


def completed(tasks: Sequence[Task], processes: int, deadline: float) -> Iterator[tuple[Task, list[dict[str, Any]]]]:
    """Tasks with their outcomes, as they finish; what is not finished by the deadline is dropped."""
    if processes == 1:
        for task in tasks:
            if time.monotonic() > deadline:
                return
            yield _outcomes(task)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # ends what still runs when it is left
        results = pool.imap_unordered(_outcomes, tasks)
        for _ in tasks:
            left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            try:
                yield results.next(left)
            except multiprocessing.TimeoutError:
                return


@dataclass(frozen=True)
class Settings:
    """Where and how long to run."""

    folder: Path
    records: Records
    device: str
    processes: int
    seconds: float
    image_seconds: float

    def execute(self, names: Sequence[str]) -> None:
        """Continue runs until they are done or the time is up."""
        self._work(names, self._open_images)

    def attack(self, names: Sequence[str]) -> None:
        """Attack the images of runs that were proven or not, in their records."""
        self._work(names, self._open_attacks)

    def _work(self, names: Sequence[str], tasks_of: Callable[[str, dict[str, Any]], list[Task]]) -> None:
        started, tasks, records = time.monotonic(), [], {}
        for name in names:
            records[name] = self._record(name)
            tasks += tasks_of(name, records[name])
        for count, (task, outcomes) in enumerate(completed(tasks, self.processes, started + self.seconds), 1):
            record = records[task.name]
            found = {one["index"]: one for one in (*record["per_image"], *outcomes)}
            record["per_image"] = [found[index] for index in sorted(found)]
            images = record.pop("per_image")
            record |= summary(RUNS[task.name], images) | {"per_image": images}  # what is long comes last
            self.records.save(record)
            shown = json.dumps(outcomes[-1])
            print(f"{count} of {len(tasks)}, {time.monotonic() - started:.0f} s: {task.name} {shown}", flush=True)

    def _record(self, name: str) -> dict[str, Any]:
        """The record of a run, with the images that are finished."""
        run, before = RUNS[name], self.records.load().get(name, {})
        fresh = self._context(name, run, subject(run.network, self.folder).masks)
        return before if _same(before, fresh) else fresh | {"per_image": []}

    def _open_images(self, name: str, record: dict[str, Any]) -> list[Task]:
        run, prover = RUNS[name], self._prover(name)
        refuse_other_conditions(name, record, self._context(name, run, prover.subject.masks))
        done, wanted, agreeing = {one["index"] for one in record["per_image"]}, [], 0
        for index, agree in enumerate(prover.agree()):
            if agreeing == run.images:
                break
            agreeing += agree or run.statement == "lemma 4"
            wanted += [] if index in done else [index]
        group = 1
        if run.statement != "lemma 4":
            group = at_once(prover.network("masked"), torch.device(self.device))
        return [self._task(name, wanted[at : at + group]) for at in range(0, len(wanted), group)]

    def _open_attacks(self, name: str, record: dict[str, Any]) -> list[Task]:
        if not record["per_image"]:
            raise SystemExit(f"there is no record of {name} with these masks and bounds")
        return [
            self._task(name, [one["index"]], one)
            for one in record["per_image"]
            if one["agree"] and "attacked" not in one and "attack_radius" not in one
        ]

    def _task(self, name: str, images: Sequence[int], attacked: dict[str, Any] | None = None) -> Task:
        return Task(name, self.folder, self.device, self.image_seconds, tuple(images), attacked)

    def _prover(self, name: str) -> Prover:
        return _prover(name, self.folder, self.device, self.image_seconds)

    def _context(self, name: str, run: Run, masks: halve.MaskSet) -> dict[str, Any]:
        unit = "pixels in 0..1" if run.statement == "region" else "of the layer's root mean square"
        about: dict[str, Any] = {"run": name, "network": run.network, "statement": run.statement}
        about |= {"method": run.method, "branches": run.branches, "gap": _finite(run.gap), "size": run.size}
        about |= {"unit": None if run.statement == "flips" else unit}
        about |= {"layers": run.layers and list(run.layers), "mask": FLIPPED.get(name, MASKS[run.network])}
        many = f", {self.processes} processes at a time" if self.processes > 1 else ""
        device = torch.cuda.get_device_name() if self.device == "cuda" else f"CPU, 1 thread{many}"
        versions = {"halve": VERSION, "torch": str(torch.__version__)}
        about |= {
            "masks": digest_of_masks(masks),
            "bounds": digest_of_bounds(*(["joint"] if "joint" in run.statement else [])),
        }
        about |= {"device": device, "image_seconds": _finite(self.image_seconds), "versions": versions}
        return about | {"date": str(datetime.date.today())}

    def flips(self, name: str, assets: Path) -> None:
        """Count flips, all at once."""
        masks, found = flips(name, assets, self.folder)
        self.records.save(self._context(name, RUNS[name], masks) | found)


def _finite(number: float) -> float | None:
    return None if math.isinf(number) else number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", type=Path, nargs="?")
    parser.add_argument("--prepare", type=Path, metavar="ASSETS", help="make the folder, from these")
    parser.add_argument("--networks", nargs="+", default=list(MASKS), choices=MASKS, help="with --prepare")
    parser.add_argument("--run", nargs="+", default=[], choices=RUNS, metavar="RUN")
    parser.add_argument("--attack", action="store_true", help="attack what --run has recorded")
    parser.add_argument("--assets", type=Path, help="for flips: the folder with all test images")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=1, help="images at a time, each on one core")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument(
        "--image-seconds", type=float, default=math.inf, help="limit for each network on an image, or a few together"
    )
    parser.add_argument("--merge", type=Path, metavar="FILE", help="take the records of this file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print(*RUNS, sep="\n")
        sys.exit()
    torch.set_num_threads(1)
    counted = [name for name in arguments.run if RUNS[name].statement == "flips"]
    others = [name for name in arguments.run if name in counted or RUNS[name].statement in ALONE]
    if arguments.attack and others:
        parser.error(
            f"--attack takes runs that prove regions or updates (digits_region_2, ...), not {', '.join(others)}"
        )
    records = Records(arguments.out)
    if arguments.merge is not None:
        records.merge(Records(arguments.merge).load())
    if arguments.prepare is not None:
        for name in arguments.networks:
            prepare(name, arguments.prepare, arguments.subjects)
    settings = Settings(
        arguments.subjects,
        records,
        arguments.device,
        arguments.processes,
        arguments.seconds,
        arguments.image_seconds,
    )
    proven = [name for name in arguments.run if name not in counted]
    for name in counted:
        settings.flips(name, arguments.assets)
    if proven:
        (settings.attack if arguments.attack else settings.execute)(proven)


if __name__ == "__main__":
    main()
