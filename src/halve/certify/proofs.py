"""Proofs for single images: the margin by which a class stays the predicted one, for each network.

Images are taken one by one, on a GPU a few at a time; Ctrl-C keeps those that are finished.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from halve.batches import Progress, images_of, iterate, result_of, tracked
from halve.certify.crown import TOLERANCE
from halve.certify.digests import ImageDigest
from halve.certify.margins import Margin, proven_margins
from halve.certify.network import Network, network_of
from halve.certify.operators import Change
from halve.certify.rounding import Interval
from halve.errors import DataError, ModelError
from halve.modules import device_of

_AT_ONCE = 30_000  # values of the largest node of all images that are taken together on a GPU
EXACT = (
    "the networks are as stored, in eval mode, and computed in exact arithmetic: the proof bounds its own rounding, "
    "but not that of the program that runs the network",
)


@dataclass(frozen=True)
class Proof:
    """What is proven for one image.

    Args:
        label: The class that the dense network predicts.
        margin: A lower bound of how far its score stays above all others, in the network for which it is smallest. If
            it is not positive, nothing is proven, and it is that of the first network that was not proven. None if it
            is not finite, or was not computed as the masked network predicts another class.
        radius: The largest change for which the proof holds, if it was searched.
        agree: Whether the masked network predicts the same class for the image itself.
        assumed: The modules from which on rounding is assumed instead of bounded, if any.
        lead: An upper bound of the margin of the updated dense network where the masked one predicts another class, if
            that was asked for; 0 if it never does.
    """

    label: int
    margin: float | None
    agree: bool
    radius: float | None = None
    assumed: frozenset[str] = frozenset()
    lead: float | None = None

    @property
    def certified(self) -> bool:
        return (self.margin is not None and self.margin > 0) or self.lead == 0

    def plain(self) -> dict[str, Any]:
        margin = None if self.margin is None or not math.isfinite(self.margin) else self.margin
        found: dict[str, Any] = {
            "class": self.label,
            "certified": self.certified,
            "agree": self.agree,
            "margin": margin,
        }
        if self.lead is not None:
            found["lead"] = self.lead if math.isfinite(self.lead) else None
        return found if self.radius is None else found | {"radius": self.radius}


@dataclass
class Proofs:
    """Proofs for several images."""

    found: list[Proof] = field(default_factory=list)
    images: ImageDigest = field(default_factory=ImageDigest)
    interrupted: bool = False

    @property
    def certified(self) -> int:
        return sum(proof.certified for proof in self.found)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is assumed of layers that no change reaches."""
        modules = sorted({module for proof in self.found for module in proof.assumed})
        if not modules:
            return ()
        return (
            f"before the changed layers, from {', '.join(modules)} on, values are those that float64 arithmetic gives, "
            f"within {TOLERANCE:g} of the largest",
        )

    def result(self) -> dict[str, Any]:
        """The result of a certificate."""
        margins = [proof.margin for proof in self.found if proof.margin is not None and math.isfinite(proof.margin)]
        counts: dict[str, Any] = {
            "images": len(self.found),
            "agree": sum(proof.agree for proof in self.found),
            "certified": self.certified,
            "share": self.certified / len(self.found),
            "median_margin": statistics.median(margins) if margins else None,
            "vacuous": not self.certified,
        }
        radii = [proof.radius for proof in self.found if proof.radius is not None]
        if radii:
            counts |= {"median_radius": statistics.median(radii), "smallest_radius": min(radii)}
        leads = [proof.lead for proof in self.found if proof.lead is not None]
        if leads:
            counts["largest_lead"] = max(leads) if math.isfinite(max(leads)) else None
        return counts | {"per_image": [proof.plain() for proof in self.found]}


def at_once(network: Network, device: torch.device) -> int:
    """How many images to take together: on a GPU, enough to fill it."""
    return 1 if device.type == "cpu" else max(1, _AT_ONCE // network.largest)


class Pair:
    """The masked network and the dense one; each is captured when its operators are first needed."""

    def __init__(self, masked: nn.Module, dense: nn.Module) -> None:
        self._models = {"masked": masked.double().eval(), "dense": dense.double().eval()}
        self._seen: Tensor | None = None  # the last image
        self._networks: dict[str, Network] = {}
        self.classes = 0  # of the last image that was seen

    def __getitem__(self, name: str) -> Network:
        if name not in self._networks:
            assert self._seen is not None
            network = network_of(self._models[name], torch.zeros_like(self._seen[None]))
            _check_captured(network, self._models[name], self._seen[None])
            self._networks[name] = network
        return self._networks[name]

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return device_of(self._models["dense"])

    def see(self, image: Tensor) -> tuple[int, bool]:
        """The class of the dense network, and whether the masked one predicts it too."""
        if self._seen is None or image.shape != self._seen.shape:
            self._networks = {}
        self._seen = image
        with torch.no_grad():
            scores = {name: result_of(model, image[None])[0] for name, model in self._models.items()}
        if not all(bool(score.isfinite().all()) for score in scores.values()):
            raise DataError("the network returned NaN or infinity: check the images and the weights")
        if any(score.dim() != 1 or len(score) < 2 for score in scores.values()):
            raise ModelError("bounds need class scores (images, classes)")
        self.classes, label = len(scores["dense"]), int(scores["dense"].argmax())
        return label, int(scores["masked"].argmax()) == label

    def margins(
        self,
        names: Sequence[str],
        box: Interval,
        changes: Callable[[str], Mapping[str, Change]],
        labels: Sequence[int],
        optimise: bool,
        branches: int,
    ) -> list[Margin]:
        """The smallest margins of the networks, one per image. Where one is not positive, the next is not bounded.

        Args:
            names: The networks.
            box: The inputs, (images, ...).
            changes: How the weights of a network may change, by layer.
            labels: The class of each image.
            optimise: Whether to optimise slopes.
            branches: Into how many parts to divide the proof of a margin, at most.
        """
        found = [Margin(math.inf)] * len(labels)
        for name in names:
            left = [i for i, one in enumerate(found) if one.bound > 0]
            if not left:
                break
            index = torch.tensor(left, device=box.low.device)
            some = {layer: change.only(index) for layer, change in changes(name).items()}
            near, classes = Interval(box.low[index], box.high[index]), [labels[i] for i in left]
            bounds = proven_margins(self[name], near, some, classes, optimise, branches)
            for i, one in zip(left, bounds, strict=True):
                found[i] = Margin(min(found[i].bound, one.bound), found[i].assumed | one.assumed)
        return found


def _check_captured(network: Network, model: nn.Module, image: Tensor) -> None:
    """Raise `ModelError` unless the operators compute what the model does for one image.

    A graph is captured with two images, and what it computes from constants is computed once. Models that draw random
    numbers, that count their calls, or that do something else with one image compute something else.
    """
    values = [image]
    with torch.no_grad():
        for node in network.nodes[1:]:
            assert node.operator is not None
            values.append(node.operator.value([values[i] for i in node.inputs]))
        wanted = model(image)
    found, size = values[-1], float(wanted.abs().max())
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0, atol=1e-6 * size + 1e-12):
        raise ModelError(
            f"{type(model).__name__} computes something else for one image than its captured graph, which bounds need: "
            f"it may draw random numbers, keep a state, or depend on the batch size. Certify flips instead"
        )


Prover = Callable[[Tensor, Sequence[int]], list[Proof]]


def prove(pair: Pair, data: Any, several: Prover, progress: Progress) -> Proofs:
    """Prove something for each image for which both networks predict the same class.

    Args:
        pair: The networks.
        data: Batches of images.
        several: Proves it for images of one shape in float64, (images, ...), and their classes.
        progress: Show progress.
    """
    proofs = Proofs()
    with suppress(KeyboardInterrupt):
        proofs.interrupted = True
        images = tracked(_Images(data, proofs.images), progress, "images")
        for group in _groups(pair, (image.to(pair.device) for image in images)):
            found: dict[int, Proof] = {}
            agree = [place for place, (_, _, same) in enumerate(group) if same]
            if agree:
                labels = [group[place][1] for place in agree]
                found = dict(
                    zip(agree, several(torch.stack([group[place][0] for place in agree]), labels), strict=True)
                )
            for place, (_, label, _) in enumerate(group):
                proofs.found.append(found.get(place, Proof(label, None, agree=False)))
        proofs.interrupted = False
    if not proofs.found:
        raise DataError("interrupted before the first image was finished")
    return proofs


def _groups(pair: Pair, images: Iterable[Tensor]) -> Iterator[list[tuple[Tensor, int, bool]]]:
    """Images of one shape to take together, each with its class and whether both networks predict it."""
    group: list[tuple[Tensor, int, bool]] = []
    for image in images:
        if group and image.shape != group[0][0].shape:
            yield group
            group = []
        group.append((image, *pair.see(image)))
        if len(group) >= at_once(pair["masked"], pair.device):
            yield group
            group = []
    if group:
        yield group


@dataclass(frozen=True)
class _Images:
    """The images of data in float64, one by one: there may be more than fit into memory."""

    data: Any
    digest: ImageDigest

    def __iter__(self) -> Iterator[Tensor]:
        for index, batch in enumerate(iterate(self.data)):
            for image in images_of(batch):
                self.digest.add(image[None], None, index)
                yield image.detach().double()

    def __len__(self) -> int:
        """How many there are, so that progress can say how long the rest takes. `TypeError` if it is not known."""
        data = self.data
        if isinstance(data, DataLoader):
            return len(data.dataset)  # type: ignore[arg-type]
        if isinstance(data, list | tuple):
            return sum(len(images_of(batch)) for batch in data)
        if not isinstance(data, Tensor):
            raise TypeError
        return len(data)


def described(proofs: Proofs, statement: str) -> str:
    """The sentence of a certificate: for how many images the statement is proven."""
    count, found = proofs.certified, proofs.result()
    finished = ", of those finished when interrupted" if proofs.interrupted else ""
    if not count:
        margin = found["median_margin"]
        known = "" if margin is None else f"; the median bound of the margin is {margin:.3g}"
        return f"Nothing is proven: for none of {found['images']:,} images{finished}, {statement}{known} (vacuous)."
    return f"Proven for {count:,} of {found['images']:,} images{finished}: {statement}."
