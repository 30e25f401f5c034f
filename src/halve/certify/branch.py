"""Proofs that are divided into parts: a ReLU whose input may have either sign is linear for each of them.

A part fixes the signs of the inputs of some ReLUs. What is proven for both signs is proven. In each part, the intervals
of the whole set are cut off at 0 where a sign is fixed, and the fixed signs take part in the bound with multipliers
(beta-CROWN). The ReLU to split is the one of a few whose two parts have the best bounds.
"""

import heapq
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halve.certify.crown import Bounds, Choices
from halve.certify.network import Network
from halve.certify.operators import Change, ReLU
from halve.certify.rounding import Interval, Owners

_STEPS, _RATE = 12, 0.1  # of optimising slopes and multipliers of a part
_TRIED = 12  # ReLUs whose parts are bounded before one is split
_PROBE = 64  # parts after which to give up if the bound rises too slowly
_AT_ONCE = {"cpu": 4, "cuda": 64}  # parts to split at a time

Split = tuple[int, int, float]  # node, place in it, sign


@dataclass(frozen=True)
class Part:
    """Some signs, a lower bound for them, and slopes to continue with."""

    splits: tuple[Split, ...]
    bound: float
    slopes: Mapping[int, Tensor]


@dataclass(frozen=True)
class Branching:
    """Bounds of one row of coefficients of the outputs, for one image, part by part.

    Args:
        network: The network.
        box: The inputs, (1, ...).
        changes: How the weights of layers may change, for this image.
        known: Intervals of all nodes, for one image.
        row: Coefficients of the outputs.
    """

    network: Network
    box: Interval
    changes: Mapping[str, Change]
    known: Sequence[Interval]
    row: Tensor

    def lower(self, most: int, deadline: float = math.inf) -> float:
        """A lower bound of row . outputs. It is positive if that could be proven, and need not be the best then.

        Args:
            most: How many parts to bound, at most.
            deadline: When to stop, by `time.monotonic`.
        """
        whole = Part((), -math.inf, {})
        [first] = self._bounded([whole], [whole])
        waiting, least, bounded, order = [(first.bound, 0, first)], math.inf, 1, itertools.count(1)
        while waiting and waiting[0][0] <= 0 and bounded < most and time.monotonic() < deadline:
            if bounded >= _PROBE and _hopeless(first.bound, waiting[0][0], bounded, most):
                break
            some = [heapq.heappop(waiting)[-1] for _ in range(min(len(waiting), _AT_ONCE[self.row.device.type]))]
            halves = self._divided(some)
            if halves is None:  # what is left of a part cannot be proven in this way
                return min(part.bound for part in some)
            bounded += len(halves)
            for part in halves:
                if part.bound > 0:
                    least = min(least, part.bound)
                else:
                    heapq.heappush(waiting, (part.bound, next(order), part))
        return min([least, *(bound for bound, _, _ in waiting)])

    def _bounds(self, parts: Sequence[Part]) -> tuple[Bounds, Owners | None]:
        """Intervals for some parts, each as an image of its own."""
        count, device = len(parts), self.row.device
        first = torch.zeros(count, dtype=torch.int64, device=device)
        splits: dict[int, Tensor] = {}
        for index, part in enumerate(parts):
            for place, at, sign in part.splits:
                if place not in splits:
                    splits[place] = torch.zeros(count, *self.known[place].low.shape[1:], dtype=torch.float64)
                splits[place].view(count, -1)[index, at] = sign
        splits = {place: sign.to(device) for place, sign in splits.items()}
        changes = {name: change.only(first) for name, change in self.changes.items()}
        known = [Interval(x.low[first], x.high[first]) for x in self.known]
        box = Interval(self.box.low[first], self.box.high[first])
        bounds = Bounds(self.network, box, changes, tighten=False, known=known, splits=splits)
        return bounds, Owners.of(torch.arange(count, device=device), count)

    def _choices(self, bounds: Bounds, owners: Owners | None, parents: Sequence[Part]) -> Choices:
        """The slopes of the parents, and no multipliers yet."""
        rows = self.row.expand(len(parents), -1)
        found = bounds.first_choices(rows, -1, owners)
        for place in found.slopes:
            if all(place in parent.slopes for parent in parents):
                found.slopes[place] = torch.cat([parent.slopes[place] for parent in parents])
        multipliers = {place: torch.zeros_like(sign) for place, sign in bounds.splits.items()}
        return Choices(found.slopes, multipliers)

    def _bounded(self, parts: Sequence[Part], parents: Sequence[Part]) -> list[Part]:
        """The parts with their bounds."""
        bounds, owners = self._bounds(parts)
        choices = self._choices(bounds, owners, parents)
        rows = self.row.expand(len(parts), -1)
        found = torch.where(bounds.overflow, -math.inf, bounds.optimised(rows, -1, owners, _STEPS, _RATE, choices))
        slopes = {place: one.detach() for place, one in choices.slopes.items()}
        return [
            Part(part.splits, max(bound, parent.bound), {place: one[i, None] for place, one in slopes.items()})
            for i, (part, parent, bound) in enumerate(zip(parts, parents, found.tolist(), strict=True))
        ]

    def _divided(self, parts: Sequence[Part]) -> list[Part] | None:
        """Both halves of parts, with their bounds; None if one has no ReLU to split."""
        candidates = self._candidates(parts)
        if not all(candidates):
            return None
        tried = [(part, where) for part, some in zip(parts, candidates, strict=True) for where in some]
        halves = [_half(part, where, sign) for part, where in tried for sign in (1.0, -1.0)]
        parents = [part for part, _ in tried for _ in range(2)]
        with torch.no_grad():
            bounds, owners = self._bounds(halves)
            choices = self._choices(bounds, owners, parents)
            found = bounds.lower(self.row.expand(len(halves), -1), -1, owners, choices).reshape(-1, 2)
        best: dict[int, tuple[float, int]] = {}
        for index, ((part, _), (one, other)) in enumerate(zip(tried, found.tolist(), strict=True)):
            score = min(one, other, 0.0) + 0.1 * min(max(one, other), 0.0)
            best[id(part)] = max(best.get(id(part), (-math.inf, 0)), (score, index))
        chosen = [2 * index + side for _, index in best.values() for side in (0, 1)]
        return self._bounded([halves[i] for i in chosen], [parents[i] for i in chosen])

    def _candidates(self, parts: Sequence[Part]) -> list[list[tuple[int, int]]]:
        """For each part the ReLU inputs that cost the bound most: by the distance of the lines around them."""
        with torch.no_grad():
            bounds, owners = self._bounds(parts)
            seen: dict[int, Tensor] = {}
            choices = self._choices(bounds, owners, parts)
            bounds.lower(self.row.expand(len(parts), -1), -1, owners, choices, seen)
        scores: list[Tensor] = []
        nodes: list[tuple[int, int]] = []
        for at, rows in seen.items():
            [source] = self.network.nodes[at].inputs
            x, operator = bounds.values[source], self.network.nodes[at].operator
            assert isinstance(operator, ReLU)
            gap = -x.low * x.high / (x.high - x.low).clamp(min=1e-300)
            cost = torch.where(operator.open(x), rows.abs() * gap * torch.where(rows < 0, 1.0, 0.5), 0.0)
            scores.append(cost.flatten(1))
            nodes.append((source, cost[0].numel()))
        if not scores:
            return [[] for _ in parts]
        values, order = torch.cat(scores, 1).topk(min(_TRIED, sum(size for _, size in nodes)), 1)
        return [
            [_place(nodes, i) for value, i in zip(some, at, strict=True) if value > 0]
            for some, at in zip(values.tolist(), order.tolist(), strict=True)
        ]


def _place(nodes: Sequence[tuple[int, int]], index: int) -> tuple[int, int]:
    """The node of a value and its place there, in a list of all values of nodes, given with their sizes.

    >>> _place([(7, 3), (5, 10)], 2), _place([(7, 3), (5, 10)], 3)
    ((7, 2), (5, 0))
    """
    for node, size in nodes:
        if index < size:
            return node, index
        index -= size
    raise IndexError(index)


def _half(part: Part, where: tuple[int, int], sign: float) -> Part:
    return Part((*part.splits, (*where, sign)), part.bound, part.slopes)


def _hopeless(first: float, now: float, bounded: int, most: int) -> bool:
    """Whether a bound would stay negative if it rose twice as fast as before, with the logarithm of the parts."""
    rate = (now - first) / math.log2(bounded)
    return now + 2 * rate * math.log2(most / bounded) < 0
