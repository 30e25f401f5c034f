"""Reuse: after any update of the weights by at most u, the old masks on the new weights keep the prediction.

u is the largest change of a single weight, as a share of the root mean square of its layer's weights, or absolute.

Agreement is that both networks, with the same update, predict the same class, whichever it is. If they do so after all
updates up to u, without ties, the class is that without an update, since the updates for which a network predicts a
class are an open set, and all updates up to u are connected. So agreement is proven by proving that both networks keep
the class. Where that fails, it is bounded how far the dense network can lead after updates for which they differ.
"""

import fnmatch
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halve.batches import Progress
from halve.certify.certificate import Certificate
from halve.certify.changes import WeightBox
from halve.certify.joint import proven_lead, shared_updates
from halve.certify.margins import Margin, proven_margins
from halve.certify.proofs import EXACT, Pair, Proof, Proofs, described, prove
from halve.certify.rounding import Interval
from halve.errors import OptionError, listed
from halve.masks.mask import MaskSet
from halve.modules import kind_of, weight_of

FIRST, PRECISION = 1e-3, 0.05  # where the search for a radius starts, and how exact it is
_SMALLEST, _LARGEST = 1e-12, 1e3
_SMALLEST_LEAD = 1e-300  # 0 is for what is proven: a bound of 0 leaves a tie open
_MOST_CLASSES = 100  # for bounds of the lead, which look at all pairs of classes: 10 s for 100, minutes for 300


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
    agreement: bool,
    optimise: bool,
    branches: int,
    progress: Progress,
) -> Certificate:
    """Certify all updates of the weights by at most `update`; see `halve.certify`."""
    units = weight_units(dense, masks, relative)
    pair = Pair(masked, dense)
    names: list[str] = []
    last = FIRST

    def margins(images: Tensor, labels: Sequence[int], sizes: Sequence[float]) -> list[Margin]:
        """The smallest margins of the networks for updates of these sizes, and what rounding is assumed."""
        if not names:
            names.extend(chosen(list(pair["masked"].layers), layers))
        found = {i: Margin(math.inf, "") for i in range(len(labels))}
        for network in ("masked", "dense") if also_dense or agreement else ("masked",):
            left = [i for i, one in found.items() if one.bound > 0]
            if left:
                scale = images.new_tensor([sizes[i] for i in left])
                changes = {name: WeightBox(units[network][name], scale) for name in names}
                some = Interval(images[left], images[left])
                wanted = [labels[i] for i in left]
                bounds = proven_margins(pair[network], some, changes, wanted, optimise, branches)
                for i, (bound, assumed) in zip(left, bounds, strict=True):
                    found[i] = Margin(min(found[i].bound, bound), found[i].assumed or assumed)
        return list(found.values())

    def classes(image: Tensor) -> int:
        parameter = next(dense.parameters())
        with torch.no_grad():
            return int(dense(image[None].to(parameter)).shape[1])

    def agreed(image: Tensor, label: int, size: float, kept: Margin) -> Proof:
        """What is proven of the agreement of both networks, given their margins for the class without an update."""
        if kept.bound > 0:
            return Proof(label, kept.bound, agree=True, assumed=kept.assumed, lead=0.0)
        if classes(image) > _MOST_CLASSES:
            return Proof(label, kept.bound, agree=True, assumed=kept.assumed, lead=math.inf)
        changes = shared_updates(pair["masked"], masks, units["dense"], names, size)
        lead, assumed = proven_lead((pair["dense"], pair["masked"]), image, changes, label, optimise)
        lead = 0.0 if lead < 0 else max(lead, _SMALLEST_LEAD)
        return Proof(label, kept.bound, agree=True, assumed=kept.assumed or assumed, lead=lead)

    def several(images: Tensor, labels: Sequence[int]) -> list[Proof]:
        nonlocal last
        if update != "radius":
            bounds = margins(images, labels, [update] * len(labels))
            return [
                agreed(image, label, update, one)
                if agreement
                else Proof(label, one.bound, agree=True, assumed=one.assumed)
                for image, label, one in zip(images, labels, bounds, strict=True)
            ]
        seen: list[dict[float, Margin]] = [{} for _ in labels]

        def hold(which: Sequence[int], sizes: Sequence[float]) -> list[bool]:
            found = margins(images[list(which)], [labels[i] for i in which], sizes)
            for i, u, one in zip(which, sizes, found, strict=True):
                seen[i][u] = one
            return [one.bound > 0 for one in found]

        proofs = []
        for label, tried, radius in zip(labels, seen, largest(hold, [last] * len(labels)), strict=True):
            best = tried[radius] if radius else max(tried.values())
            proofs.append(Proof(label, best.bound, agree=True, radius=radius, assumed=best.assumed if radius else ""))
        last = next((proof.radius for proof in reversed(proofs) if proof.radius), last)
        return proofs

    proofs = prove(pair, data, several, progress)
    which = "all layers" if layers is None else listed(layers)
    unit = "of the layer's root mean square" if relative else "each"
    result = proofs.result()
    median = _rounded(result.get("median_radius", 0), 4, ROUND_FLOOR)
    size = f"their radius (median {median})" if update == "radius" else f"{float(update)!r}"
    if agreement:
        what = "masked and dense network predict the same class"
    elif also_dense:
        what = "masked and dense network predict what the dense one did"
    else:
        what = "the masked network predicts what the dense one did"
    statement = f"after any update of the weights in {which} by up to {size} {unit}, {what}"
    settings: dict[str, Any] = {
        "reuse": update,
        "relative": relative,
        "layers": None if layers is None else list(layers),
    }
    settings |= {"also_dense": also_dense, "agreement": agreement, "optimise": optimise, "branches": branches}
    settings |= {"interrupted": proofs.interrupted}
    settings["method"] = "backward linear relaxation (CROWN) in the weights, float64"
    assumptions = (
        *EXACT,
        "only the weights of these layers change: not their biases, nor normalisation layers and their statistics",
        "the masks stay, so that what they drop stays 0",
        *proofs.assumptions,
    )
    digests = digests | {"images": proofs.images.hexdigest()}
    name, sentence = "reuse", described(proofs, statement)
    if agreement:
        name, sentence = "agreement", sentence[:-1] + _where_they_differ(proofs)
    return Certificate(name, sentence, settings, assumptions, result, digests)


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
    return [name for name in known if any(fnmatch.fnmatchcase(name, glob) for glob in layers)]


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
