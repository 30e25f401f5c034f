"""Reuse: after any update of the weights by at most u, the old masks on the new weights keep the prediction.

u is the largest change of a single weight, as a share of the root mean square of its layer's weights, or absolute.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halve.batches import Progress
from halve.certify.certificate import Certificate
from halve.certify.changes import WeightBox
from halve.certify.crown import proven_margin
from halve.certify.proofs import EXACT, Pair, Proof, described, prove
from halve.certify.rounding import Interval
from halve.errors import OptionError, listed
from halve.masks.mask import MaskSet
from halve.modules import kind_of, weight_of

FIRST, PRECISION = 1e-3, 0.05  # where the search for a radius starts, and how exact it is
_SMALLEST, _LARGEST = 1e-12, 1e3


def reuse(
    masked: nn.Module,
    dense: nn.Module,
    masks: MaskSet,
    data: Any,
    digests: dict[str, str],
    *,
    update: float | Literal["radius"],
    relative: bool,
    layers: Sequence[str] | None,
    also_dense: bool,
    optimise: bool,
    progress: Progress,
) -> Certificate:
    """Certify all updates of the weights by at most `update`; see `halve.certify`."""
    units = weight_units(dense, masks, relative)
    pair = Pair(masked, dense)
    names: list[str] = []
    last = FIRST

    def margin(image: Tensor, label: int, u: float) -> tuple[float, str]:
        """The smallest margin of the networks, and what rounding is assumed."""
        point, found, assumed = Interval(image, image), math.inf, ""
        for network in ("masked", "dense") if also_dense else ("masked",):
            changes = {name: WeightBox(u * units[network][name]) for name in names}
            one, rounding = proven_margin(pair[network], point, changes, label, optimise)
            found, assumed = min(found, one), assumed or rounding
            if not found > 0:
                break
        return found, assumed

    def one(image: Tensor, label: int) -> Proof:
        nonlocal last
        if not names:
            names.extend(chosen(list(pair["masked"].layers), layers))
        if update != "radius":
            found, assumed = margin(image, label, update)
            return Proof(label, found, agree=True, assumed=assumed)
        seen: dict[float, tuple[float, str]] = {}

        def holds(u: float) -> bool:
            seen[u] = margin(image, label, u)
            return seen[u][0] > 0

        radius = largest(holds, last)
        if not radius:
            return Proof(label, max(found for found, _ in seen.values()), agree=True, radius=0.0)
        last = radius
        return Proof(label, seen[radius][0], agree=True, radius=radius, assumed=seen[radius][1])

    proofs = prove(pair, data, one, progress)
    which = "all layers" if layers is None else listed(layers)
    unit = "of the layer's root mean square" if relative else "each"
    result = proofs.result()
    size = f"{update:.4g}" if update != "radius" else f"their radius (median {result.get('median_radius', 0):.4g})"
    both = "masked and dense network predict" if also_dense else "the masked network predicts"
    statement = f"after any update of the weights in {which} by up to {size} {unit}, {both} what the dense one did"
    settings: dict[str, Any] = {
        "reuse": update,
        "relative": relative,
        "layers": None if layers is None else list(layers),
    }
    settings |= {"also_dense": also_dense, "optimise": optimise, "interrupted": proofs.interrupted}
    settings["method"] = "backward linear relaxation (CROWN) in the weights, float64"
    assumptions = (
        *EXACT,
        "only the weights of these layers change: not their biases, nor normalisation layers and their statistics",
        "the masks stay, so that what they drop stays 0",
        *proofs.assumptions,
    )
    digests = digests | {"images": proofs.images.hexdigest()}
    return Certificate("reuse", described(proofs, statement), settings, assumptions, result, digests)


def weight_units(dense: nn.Module, masks: MaskSet, relative: bool) -> dict[str, Mapping[str, Tensor]]:
    """How far the weights of each layer move for u = 1, in the masked and in the dense network."""
    full, kept = {}, {}
    for name, module in dense.named_modules():
        if kind_of(module):
            weight = weight_of(module).detach().double().cpu()
            scale = float(weight.square().mean().sqrt()) * (1 + 1e-12) if relative else 1.0
            full[name] = torch.full_like(weight, scale)
            kept[name] = full[name] * masks[name].kept() if name in masks else full[name]
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
    return [name for name in known if any(fnmatch.fnmatchcase(name, glob) for glob in layers)]


def largest(holds: Callable[[float], bool], first: float) -> float:
    """The largest number found for which something holds, by bisection: it was verified; 0.0 if there is none.

    >>> 0.95 / 3 <= largest(lambda u: u <= 1 / 3, 1e-3) <= 1 / 3
    True
    """
    low, high = 0.0, 0.0
    u = first
    if holds(u):
        while not high and u < _LARGEST:
            low, u = u, u * 2
            if not holds(u):
                high = u
    else:
        high = u
        while not low and u > _SMALLEST:
            u /= 2 if u > first / 8 else 16
            if holds(u):
                low = u
            else:
                high = u
    while low and high and high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
