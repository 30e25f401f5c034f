"""Margins of classes, by bounds that cost more and more: each is computed where the one before does not suffice."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from halve.certify.branch import Branching
from halve.certify.crown import STEPS_INSIDE, Bounds
from halve.certify.network import Network
from halve.certify.operators import Change
from halve.certify.rounding import Interval


class Margin(NamedTuple):
    """A lower bound of a margin, and the modules from which on rounding is assumed, if any."""

    bound: float
    assumed: frozenset[str] = frozenset()

    def or_better(self, other: "Margin") -> "Margin":
        """The one with the larger bound."""
        return other if other.bound > self.bound else self


def proven_margins(
    network: Network,
    box: Interval,
    changes: Mapping[str, Change],
    labels: Sequence[int],
    optimise: bool,
    branches: int = 0,
    seconds: float = math.inf,
) -> list[Margin]:
    """Lower bounds of the margins of classes, one per image.

    Bounds with intervals inside take a fraction of the time of others, those with optimised slopes a multiple, and
    proofs in parts still more.

    Args:
        network: The network.
        box: The inputs, (images, ...).
        changes: How the weights of layers may change, by name.
        labels: The class of each image.
        optimise: Whether to optimise slopes.
        branches: Into how many parts to divide the proof of a margin, at most, where slopes do not suffice. Default: 0.
        seconds: Time limit. Default: none.
    """
    found = [Margin(-math.inf)] * len(labels)
    left, known = list(range(len(labels))), None
    deadline = time.monotonic() + seconds
    for tighten, steps in ((False, 0), (True, 0), *([(True, STEPS_INSIDE)] if optimise else [])):
        index = torch.tensor(left, device=box.low.device)
        some = {name: change.only(index) for name, change in changes.items()}
        near, limit = Interval(box.low[index], box.high[index]), deadline - time.monotonic()
        bounds = Bounds(network, near, some, tighten, steps, known, seconds=limit)
        margins = bounds.margins([labels[i] for i in left], optimise and tighten)
        for i, margin, assumed in zip(left, margins, bounds.assumed, strict=True):
            found[i] = found[i].or_better(Margin(margin, assumed))
        open_ = [place for place, i in enumerate(left) if not found[i].bound > 0]
        if not open_:
            return found
        left = [left[place] for place in open_]
        overflow = bool(bounds.overflow[open_].any())  # the values of these images are not known
        known = None if overflow else [Interval(x.low[open_], x.high[open_]) for x in bounds.values]
    if branches and optimise and known is not None:
        for place, i in enumerate(left):
            at = torch.tensor([i], device=box.low.device)
            some = {name: change.only(at) for name, change in changes.items()}
            intervals = [Interval(x.low[place, None], x.high[place, None]) for x in known]
            near = Interval(box.low[at], box.high[at])
            bound = _in_parts(network, near, some, intervals, labels[i], branches, deadline)
            found[i] = found[i].or_better(Margin(bound, found[i].assumed))
    return found


def _in_parts(
    network: Network,
    box: Interval,
    changes: Mapping[str, Change],
    known: Sequence[Interval],
    label: int,
    branches: int,
    deadline: float,
) -> float:
    """A lower bound of the margin of a class for one image, other class by other class, the closest first."""
    classes = known[-1].low.shape[1]
    rows = -torch.eye(classes, dtype=torch.float64, device=box.low.device)
    rows[:, label] += 1.0
    with torch.no_grad():
        bounds = Bounds(network, box, changes, tighten=False, known=known).lower(rows).tolist()
    least = math.inf
    for _, other in sorted((bound, other) for other, bound in enumerate(bounds) if other != label):
        if time.monotonic() > deadline:
            return -math.inf
        row = rows[other, None]
        least = min(least, Branching(network, box, changes, known, row).lower(branches, deadline))
        if least <= 0:
            break  # other classes may be worse still
    return least if least > 0 else -math.inf
