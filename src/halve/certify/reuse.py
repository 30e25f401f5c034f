"""Reuse: after any update of the weights by at most u, the old masks on the new weights keep the prediction.

u is the largest change of a single weight, as a share of the root mean square of its layer's weights, or absolute.

Agreement is that both networks, with the same update, predict the same class, whichever it is. If they do so after all
updates up to u, without ties, the class is that without an update, since the updates for which a network predicts a
class are an open set, and all updates up to u are connected. So agreement is proven by proving that both networks keep
the class. Where that fails, it is bounded how far the dense network can lead after updates for which they differ.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halve.batches import Progress
from halve.certify.certificate import Certificate
from halve.certify.changes import WeightBox
from halve.certify.joint import proven_lead, shared_updates
from halve.certify.margins import Margin
from halve.certify.operators import Change
from halve.certify.proofs import EXACT, Pair, Proof, Proofs, described, prove
from halve.certify.rounding import Interval
from halve.errors import ModelError, OptionError, listed
from halve.masks.mask import MaskSet
from halve.modules import kind_of, weight_key, weight_name, weight_of

FIRST, PRECISION = 1e-3, 0.05  # where the search for a radius starts, and how exact it is
_SMALLEST, _LARGEST = 1e-12, 1e3
_SMALLEST_LEAD = 1e-300  # 0 is for what is proven: a bound of 0 leaves a tie open
_MOST_CLASSES = 100  # for bounds of the lead, which look at all pairs of classes: 10 s for 100, minutes for 300


@dataclass(frozen=True)
class Update:
    """Which updates of the weights a statement is about; see `halve.certify`.

    Args:
        size: The largest change of a weight; "radius" finds the largest for each image.
        relative: Whether it is relative to the root mean square of the layer's dense weights.
        layers: Globs of the layers that are updated; None for all.
        also_dense: Whether the dense network is to keep the prediction too.
        agreement: Whether the statement is that both networks agree.
    """

    size: float | Literal["radius"]
    relative: bool
    layers: Sequence[str] | None
    also_dense: bool
    agreement: bool

    @property
    def settings(self) -> dict[str, Any]:
        """What a certificate says of it."""
        layers = None if self.layers is None else list(self.layers)
        found: dict[str, Any] = {"reuse": self.size, "relative": self.relative, "layers": layers}
        return found | {"also_dense": self.also_dense, "agreement": self.agreement}


def reuse(
    masked: nn.Module,
    dense: nn.Module,
    masks: MaskSet,
    data: Any,
    digests: dict[str, str],
    *,
    update: Update,
    optimise: bool,
    branches: int,
    progress: Progress,
) -> Certificate:
    """Certify all updates of the weights by at most `update.size`; see `halve.certify`."""
    prover = _Prover(masked, dense, masks, update, optimise, branches)
    proofs = prove(prover.pair, data, prover.several, progress)
    settings = update.settings | {"optimise": optimise, "branches": branches, "interrupted": proofs.interrupted}
    settings["method"] = "backward linear relaxation (CROWN) in the weights, float64"
    assumptions = (
        *EXACT,
        "only the weights of these layers change: not their biases, nor normalisation layers and their statistics",
        "the masks stay, so that what they drop stays 0",
        *proofs.assumptions,
    )
    digests = digests | {"images": proofs.images.hexdigest()}
    name, sentence = "reuse", described(proofs, _statement(update, proofs))
    if update.agreement:
        name, sentence = "agreement", sentence[:-1] + _where_they_differ(proofs)
    return Certificate(name, sentence, settings, assumptions, proofs.result(), digests)


class _Prover:
    """Proves for images that updates keep the prediction."""

    def __init__(
        self, masked: nn.Module, dense: nn.Module, masks: MaskSet, update: Update, optimise: bool, branches: int
    ) -> None:
        self._units, self._dense = weight_units(dense, masks, update.relative), dense
        self.pair, self._masks, self._update = Pair(masked, dense), masks, update
        self._optimise, self._branches = optimise, branches
        self._first = FIRST  # where the next search for a radius starts

    def several(self, images: Tensor, labels: Sequence[int]) -> list[Proof]:
        """What is proven for images, (images, ...), of these classes."""
        size = self._update.size
        if size == "radius":
            return self._radii(images, labels)
        margins = self._margins(images, labels, [size] * len(labels))
        found = [
            Proof(label, one.bound, agree=True, assumed=one.assumed) for label, one in zip(labels, margins, strict=True)
        ]
        if not self._update.agreement:
            return found
        return [self._agreed(image, size, proof) for image, proof in zip(images, found, strict=True)]

    @functools.cached_property
    def _names(self) -> list[str]:
        """The layers that are updated."""
        network = self.pair["masked"]
        names = chosen(list(network.layers), self._update.layers)
        # layers of the model whose weights the network uses otherwise, or by the name of a layer they share it with
        beside = [name for name in self._units["dense"] if name not in network.layers]
        beside = [name for name in beside if self._update.layers is None or _named(name, self._update.layers)]
        network.check_changes([*names, *beside])
        keys = {weight_key(self._dense.get_submodule(name)) for name in names if name in self._units["dense"]}
        if apart := [name for name in beside if weight_key(self._dense.get_submodule(name)) in self._shared - keys]:
            raise OptionError(f"layers= names {listed(apart)} but not the layer that has the same weight: name it too")
        if others := [name for name in names if name not in self._units["dense"]]:
            known = dict(self._dense.named_parameters())
            weights = [name if name in known else weight_name(name) for name in others]
            rest = [name for name in names if name not in others]
            advice = f"pass layers= with those that are updated, of {listed(rest)}; or " if rest else ""
            raise ModelError(
                f"certify bounds updates of the weights of convolutions and Linear layers, but {listed(weights)} "
                f"belongs to none: {advice}make it the weight of an nn.Linear"
            )
        return names

    @functools.cached_property
    def _shared(self) -> set[int]:
        """The weights of all layers that the network computes, by their keys."""
        known = [name for name in self.pair["masked"].layers if name in self._units["dense"]]
        return {weight_key(self._dense.get_submodule(name)) for name in known}

    def _margins(self, images: Tensor, labels: Sequence[int], sizes: Sequence[float]) -> list[Margin]:
        """The smallest margins of the networks for updates of these sizes."""
        scale = images.new_tensor(sizes)
        both = self._update.also_dense or self._update.agreement

        def changes(network: str) -> dict[str, Change]:
            return {name: WeightBox(self._units[network][name], scale) for name in self._names}

        networks = ("masked", "dense") if both else ("masked",)
        point = Interval(images, images)
        return self.pair.margins(networks, point, changes, labels, self._optimise, self._branches)

    def _agreed(self, image: Tensor, size: float, kept: Proof) -> Proof:
        """What is proven of the agreement of both networks, given what is proven of their margins."""
        if kept.certified:
            return dataclasses.replace(kept, lead=0.0)
        if self.pair.classes > _MOST_CLASSES:
            return dataclasses.replace(kept, lead=math.inf)
        networks = self.pair["dense"], self.pair["masked"]
        changes = shared_updates(networks[1], self._masks, self._units["dense"], self._names, size)
        lead, assumed = proven_lead(networks, image, changes, kept.label, self._optimise)
        lead = 0.0 if lead < 0 else max(lead, _SMALLEST_LEAD)
        return dataclasses.replace(kept, lead=lead, assumed=kept.assumed | assumed)

    def _radii(self, images: Tensor, labels: Sequence[int]) -> list[Proof]:
        """The largest updates for which images keep their classes."""
        seen: list[dict[float, Margin]] = [{} for _ in labels]

        def hold(which: Sequence[int], sizes: Sequence[float]) -> list[bool]:
            found = self._margins(images[list(which)], [labels[i] for i in which], sizes)
            for i, u, one in zip(which, sizes, found, strict=True):
                seen[i][u] = one
            return [one.bound > 0 for one in found]

        proofs = []
        for label, tried, radius in zip(labels, seen, largest(hold, [self._first] * len(labels)), strict=True):
            best = tried[radius] if radius else max(tried.values(), key=lambda one: one.bound)
            assumed = best.assumed if radius else frozenset()
            proofs.append(Proof(label, best.bound, agree=True, radius=radius, assumed=assumed))
        self._first = next((proof.radius for proof in reversed(proofs) if proof.radius), self._first)
        return proofs


def _statement(update: Update, proofs: Proofs) -> str:
    """What is proven for some images."""
    which = "all layers" if update.layers is None else listed(update.layers)
    unit = "of the layer's root mean square" if update.relative else "each"
    median = _rounded(proofs.result().get("median_radius", 0), 4, ROUND_FLOOR)
    size = f"their radius (median {median})" if update.size == "radius" else f"{float(update.size)!r}"
    if update.agreement:
        what = "masked and dense network predict the same class"
    elif update.also_dense:
        what = "masked and dense network predict what the dense one did"
    else:
        what = "the masked network predicts what the dense one did"
    return f"after any update of the weights in {which} by up to {size} {unit}, {what}"


def _where_they_differ(proofs: Proofs) -> str:
    """The end of a sentence: how far the dense network can lead where the masked one differs, if that is known."""
    leads = [proof.lead for proof in proofs.found if proof.lead]
    if not leads or not math.isfinite(max(leads)):
        return "."
    count = f"{len(leads):,} more" if proofs.certified else f"{len(leads):,}"
    most = _rounded(max(leads), 3, ROUND_CEILING)
    return f"; for {count}, they may differ only where the updated dense one leads by at most {most}."


def _rounded(number: float, digits: int, rounding: str) -> str:
    """A number with this many digits, rounded so that what is claimed stays true.

    >>> _rounded(0.372402, 3, ROUND_CEILING), _rounded(0.1, 3, ROUND_CEILING), _rounded(0.0123456, 4, ROUND_FLOOR)
    ('0.373', '0.1', '0.01234')
    """
    exact = Decimal(repr(float(number)))
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(exact)):.{digits}g}"


def weight_units(dense: nn.Module, masks: MaskSet, relative: bool) -> dict[str, Mapping[str, Tensor]]:
    """How far the weights of each layer move for u = 1, in the masked and in the dense network."""
    full, kept = {}, {}
    for name, module in dense.named_modules():
        if kind_of(module):
            weight = weight_of(module).detach().double()
            scale = float(weight.square().mean().sqrt()) * (1 + 1e-12) if relative else 1.0
            full[name] = torch.full_like(weight, scale)
            kept[name] = full[name] * masks[name].kept().to(weight.device) if name in masks else full[name]
    return {"masked": kept, "dense": full}


def chosen(known: Sequence[str], layers: Sequence[str] | None) -> list[str]:
    """The layers that globs name; all by default.

    >>> chosen(["layer1.conv", "layer2.conv", "fc"], ["layer2.*", "fc"])
    ['layer2.conv', 'fc']
    """
    if layers is None:
        return list(known)
    for glob in layers:
        if not any(fnmatch.fnmatchcase(name, glob) for name in known):
            raise OptionError(f"layers= names {glob!r}, which matches no layer; there are {listed(known)}")
    return [name for name in known if _named(name, layers)]


def _named(name: str, layers: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in layers)


def largest(hold: Callable[[Sequence[int], Sequence[float]], Sequence[bool]], first: Sequence[float]) -> list[float]:
    """The largest numbers found for which something holds, by bisection: they were verified; 0.0 where there is none.

    Args:
        hold: `hold(which, sizes)` says for some of the searches whether it holds for a number.
        first: Where each search starts.

    >>> [one, two] = largest(lambda which, sizes: [u <= (1 / 3, 7)[i] for i, u in zip(which, sizes)], [1e-3, 1e-3])
    >>> 0.95 / 3 <= one <= 1 / 3, 0.95 * 7 <= two <= 7
    (True, True)
    """
    searches = [_search(one) for one in first]
    asked, found = {i: next(search) for i, search in enumerate(searches)}, [0.0] * len(first)
    while asked:
        which, sizes, asked = list(asked), list(asked.values()), {}
        for i, good in zip(which, hold(which, sizes), strict=True):
            try:
                asked[i] = searches[i].send(good)
            except StopIteration as end:
                found[i] = end.value
    return found


def _search(u: float) -> Generator[float, bool, float]:
    """Yields numbers to try, is sent whether it holds for them, and returns the largest for which it does."""
    low, high, first = 0.0, 0.0, u
    if (yield u):
        while not high and u < _LARGEST:
            low, u = u, u * 2
            if not (yield u):
                high = u
    else:
        high = u
        while not low and u > _SMALLEST:
            u /= 2 if u > first / 8 else 16
            if (yield u):
                low = u
            else:
                high = u
    while low and high and high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (yield middle) else (low, middle)
    return low
