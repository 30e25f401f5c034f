"""The statements of certify.py about single images: how each is proven, summarised and attacked."""

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from certify_subjects import MASKS, Pair
from torch import Tensor

from halve.certify.attack import attack_agreement, attack_input, attack_lead, attack_weights, margin_of
from halve.certify.changes import WeightBox
from halve.certify.crown import STEPS_INSIDE, Bounds, OutOfTime
from halve.certify.joint import proven_lead, shared_updates
from halve.certify.lemmas import lemma_3, norm
from halve.certify.margins import proven_margins
from halve.certify.operators import Layer, Linear
from halve.certify.region import box
from halve.certify.reuse import PRECISION, chosen, largest
from halve.certify.rounding import Interval

Changes = tuple[Interval, dict[str, WeightBox]]  # the inputs, and how the weights of layers may change
Outcome = dict[str, Any]  # what is recorded of an image
BOTH = ("dense", "masked")  # the harder one first


@dataclass(frozen=True)
class Statement(ABC):
    """A statement about a network.

    Args:
        size: eps in pixels, or u relative to the root mean square. None: the radius.
        images: How many images it is made about.
        layers: Layers that are updated. Default: all.
        method: What proves it.
        branches: Parts that a proof may be divided into.
        gap: Slopes inside the network are optimised where the bound is at most this share of the margin below 0.
    """

    name: ClassVar[str]
    unit: ClassVar[str | None] = "of the layer's root mean square"
    sources: ClassVar[tuple[str, ...]] = ()  # more files of halve/certify that compute its bounds

    network: str
    size: float | None
    images: int
    layers: tuple[str, ...] | None = None
    method: str = "CROWN"
    branches: int = 0
    gap: float = math.inf

    @property
    def mask(self) -> str:
        """How the masks were made."""
        return MASKS[self.network]

    def about(self) -> dict[str, Any]:
        """What a record says of the statement."""
        about: dict[str, Any] = {"network": self.network, "statement": self.name, "method": self.method}
        about |= {"branches": self.branches, "gap": None if math.isinf(self.gap) else self.gap, "size": self.size}
        return about | {"unit": self.unit, "layers": self.layers and list(self.layers), "mask": self.mask}


class OfImages(Statement):
    """A statement about single images."""

    disagreeing: ClassVar[bool] = False  # whether it is made about images on which the networks disagree, too

    @abstractmethod
    def prove(self, pair: Pair, images: Tensor) -> list[Outcome]:
        """The outcome for each of some images."""

    @abstractmethod
    def summary(self, found: list[Outcome]) -> dict[str, Any]:
        """What is published of the outcomes; none of them may agree."""


class KeepsClass(OfImages):
    """The class of an image stays the same for all changes: the margin over all other classes is bounded."""

    names: ClassVar[tuple[str, ...]]  # the networks that it is proven for
    first: ClassVar[float]  # where the search for a radius starts

    @abstractmethod
    def changes(self, pair: Pair, name: str, images: Tensor, sizes: Sequence[float]) -> Changes:
        """What may change, in a network and for each image."""

    @abstractmethod
    def attacked(self, pair: Pair, name: str, image: Tensor, label: int, size: float) -> float:
        """The smallest margin that an attack finds."""

    def prove(self, pair: Pair, images: Tensor) -> list[Outcome]:
        with torch.no_grad():
            scores = {name: model(images) for name, model in pair.models.items()}
        labels = scores["dense"].argmax(1).tolist()
        nominal = {name: [float(margin_of(*one)) for one in zip(s, labels, strict=True)] for name, s in scores.items()}
        agree = [i for i, margin in enumerate(nominal["masked"]) if margin > 0]
        found: list[Outcome] = [{"agree": i in agree, "label": label} for i, label in enumerate(labels)]
        if not agree:
            return found
        started, some, classes = time.perf_counter(), images[agree], [labels[i] for i in agree]
        outcomes = self._radii(pair, some, classes) if self.size is None else self._margins(pair, some, classes)
        seconds = (time.perf_counter() - started) / len(agree)
        for i, outcome in zip(agree, outcomes, strict=True):
            margins = {name: margin[i] for name, margin in nominal.items()}
            found[i] |= outcome | {"nominal": margins, "seconds": seconds}
        return found

    def bounds(
        self, pair: Pair, name: str, images: Tensor, labels: Sequence[int], sizes: Sequence[float]
    ) -> list[float | None]:
        """Lower bounds of the margins; None if they took too long."""
        return bounds(self, pair, name, self.changes(pair, name, images, sizes), labels)

    def _margins(self, pair: Pair, images: Tensor, labels: list[int]) -> list[Outcome]:
        assert self.size is not None
        found: list[dict[str, float | None]] = [{} for _ in labels]
        for name in self.names:
            left = [i for i, one in enumerate(found) if _proven(one)]
            if left:
                new = self.bounds(pair, name, images[left], [labels[i] for i in left], [self.size] * len(left))
                for i, bound in zip(left, new, strict=True):
                    found[i][name] = bound
        return [{"certified": _proven(one), "bounds": one} for one in found]

    def _radii(self, pair: Pair, images: Tensor, labels: list[int]) -> list[Outcome]:
        """The largest changes that are certified."""

        def hold(which: Sequence[int], sizes: Sequence[float]) -> list[bool]:
            good = dict(zip(which, sizes, strict=True))
            for name in self.names:
                left = list(good)
                if left:
                    found = self.bounds(pair, name, images[left], [labels[i] for i in left], list(good.values()))
                    good = {i: good[i] for i, bound in zip(left, found, strict=True) if bound and bound > 0}
            return [i in good for i in which]

        radii = largest(hold, [self.first] * len(labels))
        return [{"certified": radius > 0, "radius": radius} for radius in radii]

    def attack(self, pair: Pair, image: Tensor, one: Outcome) -> Outcome:
        """What an attack finds for an image whose outcome is known: the smallest margin, or the largest change."""
        label = one["label"]
        if self.size is None:
            first = one["radius"] or 1e-3

            def hold(which: Sequence[int], sizes: Sequence[float]) -> list[bool]:
                return [all(self.attacked(pair, name, image, label, u) > 0 for name in self.names) for u in sizes]

            [kept] = largest(hold, [3 * first])
            if kept < one["radius"]:
                raise SystemExit(f"a certified image was attacked successfully: {one}, {kept}")
            return {"attack_radius": kept}
        found = {name: self.attacked(pair, name, image, label, self.size) for name in one["bounds"]}
        wrong = {name for name, bound in one["bounds"].items() if bound is not None and bound > found[name]}
        if wrong or (one["certified"] and min(found.values()) <= 0):
            raise SystemExit(f"a certified image was attacked successfully: {one}, {found}")
        last = list(found)[-1]
        bound, nominal = one["bounds"][last], one["nominal"][last]
        worst = nominal - found[last]
        known = bound is not None and worst > 0 and nominal - bound < 1e12
        tightness = (nominal - bound) / worst if known else None
        return {"found": found, "tightness": tightness, "attacked": min(found.values()) <= 0}

    def summary(self, found: list[Outcome]) -> dict[str, Any]:
        agree = [one for one in found if one["agree"]]
        result: dict[str, Any] = {"n": len(agree), "disagree": len(found) - len(agree)}
        if not agree:
            return result
        result["share_certified"] = sum(one["certified"] for one in agree) / len(agree)
        result["seconds_per_image"] = statistics.mean(one["seconds"] for one in agree)
        attacked = [one for one in agree if "attacked" in one or "attack_radius" in one]
        result["attacks"] = len(attacked)
        if self.size is None:
            result["median_radius"] = statistics.median(one["radius"] for one in agree)
            result["median_attack_radius"] = _median([one["attack_radius"] for one in attacked])
            return result
        result["attack"] = sum(one["attacked"] for one in attacked) / len(attacked) if attacked else None
        last = [list(one["bounds"].values())[-1] for one in agree]
        result["tightness"] = _median([one["tightness"] for one in attacked if one["tightness"] is not None])
        result["median_bound"] = _median([bound for bound in last if bound is not None])
        return result | {"out_of_time": sum(None in one["bounds"].values() for one in agree)}


class Region(KeepsClass):
    """No change of the pixels by at most eps changes the class that both networks predict."""

    name, unit = "region", "pixels in 0..1"
    names, first = BOTH, 4 / 255

    def changes(self, pair: Pair, name: str, images: Tensor, sizes: Sequence[float]) -> Changes:
        mean, std = pair.subject.mean, pair.subject.std
        near = [box(x[None], u, mean, std) for x, u in zip(images, sizes, strict=True)]
        return Interval(torch.cat([one.low for one in near]), torch.cat([one.high for one in near])), {}

    def attacked(self, pair: Pair, name: str, image: Tensor, label: int, size: float) -> float:
        near, _ = self.changes(pair, name, image[None], [size])
        return attack_input(pair.models[name], near, label)


class Reuse(KeepsClass):
    """No update of the weights by at most u changes the class that the masked network predicts."""

    name = "reuse"
    names, first = ("masked",), 5e-3

    def changes(self, pair: Pair, name: str, images: Tensor, sizes: Sequence[float]) -> Changes:
        return updates(self, pair, name, images, sizes)

    def attacked(self, pair: Pair, name: str, image: Tensor, label: int, size: float) -> float:
        _, changes = self.changes(pair, name, image[None], [size])
        radii = {layer: size * change.radii for layer, change in changes.items()}
        return attack_weights(pair.models[name], image, label, radii)


class Lemmas(OfImages):
    """The paper's lemmas on the graph of a network with residual connections: products and sums of norms.

    Lemmas 1 and 2 bound how much the scores of the dense and of the masked network change for a change of the input by
    1; lemma 3 says which share of the norm of a layer any legal mask removes at most; lemmas 4 to 6 bound how much the
    scores change by these masks, by any legal ones, and by these masks with updates of the given size.
    """

    name, disagreeing = "lemmas", True

    def prove(self, pair: Pair, images: Tensor) -> list[Outcome]:
        return [self._bounds(pair, image) for image in images]

    def _bounds(self, pair: Pair, image: Tensor) -> Outcome:
        scores = pair.models["dense"](image[None])[0]
        found: Outcome = {"agree": True, "margin": float(margin_of(scores, int(scores.argmax())))}
        masks, units, u = pair.subject.masks, pair.units["dense"], self.size or 0.0
        values, bounds = (
            [image[None]],
            [{"lemma 1": 1.0, "lemma 2": 1.0, "lemma 4": 0.0, "lemma 5": 0.0, "lemma 6": 0.0}],
        )
        removable = []
        nodes = zip(pair.network("masked").nodes[1:], pair.network("dense").nodes[1:], strict=True)
        for masked, dense in nodes:
            inputs = [values[i] for i in dense.inputs]
            assert dense.operator is not None
            assert masked.operator is not None
            values.append(dense.operator.value(inputs))
            # sums add up; ReLU and pooling increase nothing
            total = {name: sum(bounds[i][name] for i in dense.inputs) for name in bounds[0]}
            if isinstance(masked.operator, Layer) and isinstance(dense.operator, Layer):
                layer, size = dense.operator.name, float(inputs[0].abs().max())
                before, after = norm(dense.operator.weight), norm(masked.operator.weight)
                removed = norm(masked.operator.weight - dense.operator.weight)
                most = lemma_3(dense.operator.weight, masks[layer]) if layer in masks else 0.0
                moved = u * norm(units[layer] * (masked.operator.weight != 0))
                removable += [most / before] if layer in masks else []
                total = {
                    "lemma 1": before * total["lemma 1"],
                    "lemma 2": (before + removed) * total["lemma 2"],
                    "lemma 4": after * total["lemma 4"] + removed * size,
                    "lemma 5": before * total["lemma 5"] + most * size,
                    "lemma 6": (after + moved) * total["lemma 6"] + (removed + moved) * size,
                }
            elif isinstance(masked.operator, Linear) and masked.operator.terms:
                gain = float(masked.operator.apply_absolute(torch.ones_like(inputs[0])).max())
                moved = float((masked.operator.value(inputs) - values[-1]).abs().max())  # recalibrated statistics
                total = {name: gain * one + (moved if name > "lemma 2" else 0.0) for name, one in total.items()}
            bounds.append(total)
        return found | bounds[-1] | {"lemma 3": _median(removable)}

    def summary(self, found: list[Outcome]) -> dict[str, Any]:
        keys = ("margin", *(f"lemma {number}" for number in range(1, 7)))
        return {"n": len(found)} | {
            f"median_{key.replace(' ', '_')}": _median([one[key] for one in found]) for key in keys
        }


class Agreement(OfImages):
    """The largest update for which an attack flips neither network, and whether they differ after one just above it."""

    name = "agreement"

    def prove(self, pair: Pair, images: Tensor) -> list[Outcome]:
        return [self._attacked(pair, image) for image in images]

    def _attacked(self, pair: Pair, image: Tensor) -> Outcome:
        masked, dense = pair.models["masked"], pair.models["dense"]
        if int(masked(image[None]).argmax()) != int(dense(image[None]).argmax()):
            return {"agree": False}

        def attacked(u: float) -> tuple[bool, bool]:
            radii = {name: u * unit for name, unit in pair.units["dense"].items()}
            return attack_agreement(masked, dense, image, radii, pair.subject.masks)

        [kept] = largest(lambda which, sizes: [not attacked(u)[0] for u in sizes], [1e-2])
        return {"agree": True, "radius": kept, "differ": attacked(kept * (1 + PRECISION))[1]}

    def summary(self, found: list[Outcome]) -> dict[str, Any]:
        agree = [one for one in found if one["agree"]]
        radius, differ = _median([one["radius"] for one in agree]), sum(one["differ"] for one in agree)
        return {"n": len(agree), "median_attack_radius": radius, "differ": differ}


class JointAgreement(OfImages):
    """Whether both networks are proven to keep the class after the same update, or to agree, and what attacks find.

    The bounds of both together are found for all images, also where the class is kept, to compare what they prove.
    """

    name, sources = "joint agreement", ("joint",)

    def prove(self, pair: Pair, images: Tensor) -> list[Outcome]:
        return [self._together(pair, image) for image in images]

    def _together(self, pair: Pair, image: Tensor) -> Outcome:
        masked, dense, size = pair.models["masked"], pair.models["dense"], self.size
        assert size is not None
        scores = dense(image[None])[0]
        label = int(scores.argmax())
        if int(masked(image[None]).argmax()) != label:
            return {"agree": False}
        started, layers = time.perf_counter(), chosen(list(pair.network("dense").layers), self.layers)
        found: dict[str, float | None] = {}
        for name in BOTH:
            [found[name]] = bounds(self, pair, name, updates(self, pair, name, image[None], [size]), [label])
            if not _proven(found):
                break
        changes = shared_updates(pair.network("masked"), pair.subject.masks, pair.units["dense"], layers, size)
        lead = proven_lead((pair.network("dense"), pair.network("masked")), image, changes, label, True).bound
        seconds = time.perf_counter() - started
        radii = {name: size * pair.units["dense"][name] for name in layers}
        attacked = attack_lead(masked, dense, image, radii, pair.subject.masks)
        if attacked is not None and (attacked > lead or _proven(found)):
            raise SystemExit(f"bounds were attacked successfully: {found}, {lead}, {attacked}")
        result = {"agree": True, "bounds": found, "keeps": _proven(found), "joint": lead < 0, "lead": max(lead, 0.0)}
        return result | {"margin": float(margin_of(scores, label)), "attack_lead": attacked, "seconds": seconds}

    def summary(self, found: list[Outcome]) -> dict[str, Any]:
        agree = [one for one in found if one["agree"]]
        if not agree:
            return {"n": 0}
        open_ = [one for one in agree if not one["keeps"] and not one["joint"]]
        result: dict[str, Any] = {"n": len(agree), "keeps": sum(one["keeps"] for one in agree)}
        result |= {"only_joint": sum(one["joint"] and not one["keeps"] for one in agree), "open": len(open_)}
        result |= {key: _median([one[key] for one in open_]) for key in ("lead", "margin")}
        result["differ"] = sum(one["attack_lead"] is not None for one in agree)
        return result | {"seconds_per_image": statistics.mean(one["seconds"] for one in agree)}


def updates(statement: Statement, pair: Pair, name: str, images: Tensor, sizes: Sequence[float]) -> Changes:
    """Updates of the weights by at most these sizes, for each image."""
    layers, scale = chosen(list(pair.network(name).layers), statement.layers), images.new_tensor(sizes)
    return Interval(images, images), {layer: WeightBox(pair.units[name][layer], scale) for layer in layers}


def bounds(statement: Statement, pair: Pair, name: str, changes: Changes, labels: Sequence[int]) -> list[float | None]:
    """Lower bounds of the margins of a network by the method of a statement; None if they took too long."""
    network, near, weights = pair.network(name), *changes
    try:
        if statement.method == "intervals":
            low, high = Bounds(network, near, weights, tighten=False).values[-1]
            return [
                float(a[label] - torch.cat([b[:label], b[label + 1 :]]).max())
                for a, b, label in zip(low, high, labels, strict=True)
            ]
        if math.isfinite(statement.gap):
            return _promising(statement, pair, name, changes, labels)
        found = proven_margins(network, near, weights, labels, True, statement.branches, pair.seconds)
        return [one.bound for one in found]
    except OutOfTime:
        return [None] * len(labels)


def _promising(
    statement: Statement, pair: Pair, name: str, changes: Changes, labels: Sequence[int]
) -> list[float | None]:
    """Like `proven_margins`, but slopes inside are optimised only where a proof is within reach."""
    network, near, weights = pair.network(name), *changes
    started = time.monotonic()
    plain = Bounds(network, near, weights, seconds=pair.seconds)
    found = plain.margins(labels, optimise=True)
    nominal = Bounds(network, Interval(near.center, near.center), tighten=False).margins(labels)
    left = [i for i, (bound, most) in enumerate(zip(found, nominal, strict=True)) if 0 >= bound > -statement.gap * most]
    if left and not bool(plain.overflow[left].any()):
        some = {layer: change.only(torch.tensor(left, device=near.low.device)) for layer, change in weights.items()}
        known = [Interval(x.low[left], x.high[left]) for x in plain.values]
        rest = pair.seconds - (time.monotonic() - started)
        inside = Bounds(network, known[0], some, True, STEPS_INSIDE, known, seconds=rest)
        for i, bound in zip(left, inside.margins([labels[i] for i in left], optimise=True), strict=True):
            found[i] = max(found[i], bound)
    return list(found)


def _proven(found: dict[str, float | None]) -> bool:
    """Whether all networks that were looked at keep the class."""
    return all(bound is not None and bound > 0 for bound in found.values())


def _median(numbers: list[float]) -> float | None:
    return statistics.median(numbers) if numbers else None
