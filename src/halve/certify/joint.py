"""Bounds of the dense and the masked network together, whose weights get the same update.

Both are bounded as one network that returns the scores of both, so that any combination of these has a bound. The
derivatives by a weight are added up over both networks before taking absolute values: what an update does to both
alike cancels in their difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds
from halve.certify.margins import Margin
from halve.certify.network import Network, Node
from halve.certify.operators import Change, Concatenation, Layer, Operator
from halve.certify.rounding import UNIT, Interval, Owners, by_image, from_images, gamma, loss
from halve.masks.mask import MaskSet

_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # of the masked margin in combinations: any gives a bound
_CLOSER = (0.12, 0.06, 0.03)  # steps from the best of them, relative to 1 + its size
_STEPS, _RATE = 20, 0.1  # of optimising slopes


def side_by_side(one: Network, other: Network) -> Network:
    """Two networks with the same input as one. Its scores are those of the first, then those of the second.

    >>> from halve.certify.network import network_of
    >>> x = torch.ones(1, 2, dtype=torch.float64)
    >>> both = side_by_side(*(network_of(torch.nn.Sequential(torch.nn.Linear(2, 3)), x) for _ in range(2)))
    >>> len(both.nodes), Bounds(both, Interval(x, x)).values[-1].low.shape
    (4, torch.Size([1, 6]))
    """
    shift = len(one.nodes) - 1

    def moved(place: int) -> int:
        return place + shift if place else 0  # the first node is the input, which both read

    rest = [Node(node.operator, tuple(map(moved, node.inputs)), node.module) for node in other.nodes[1:]]
    last = Node(Concatenation(0), (shift, moved(len(other.nodes) - 1)), "")
    return Network((*one.nodes, *rest, last), max(one.largest, other.largest))


@dataclass(frozen=True, eq=False)
class SharedUpdate(Change):
    """Every weight may move by at most its radius, in both networks by the same amount; what the mask drops stays 0.

    By itself it bounds one of the networks; `SharedLoss` bounds both.

    Args:
        radii: The radius of each weight in the dense network.
        kept: Which weights the mask keeps; None if the layer has no mask.
        masked: The layers of the masked network that have this weight.
    """

    radii: Tensor
    kept: Tensor | None
    masked: list[Layer]

    def factor(self, layer: Layer) -> Tensor | None:
        """What a change of the dense weight is multiplied by in a layer; None for 1."""
        return self.kept if any(layer is one for one in self.masked) else None

    def box(self, layer: Layer) -> WeightBox:
        """The change of a layer of one network."""
        factor = self.factor(layer)
        return WeightBox(self.radii if factor is None else self.radii * factor)

    def radius(self, layer: Layer, inputs: Interval) -> Tensor:
        return self.box(layer).radius(layer, inputs)

    def loss(self, layer: Layer, rows: Tensor, inputs: Interval, owners: Owners | None) -> Tensor:
        return self.box(layer).loss(layer, rows, inputs, owners)


@dataclass(eq=False)
class SharedLoss(Change):
    """What one backward pass through both networks loses by their update: it adds up the derivatives that it meets.

    Args:
        update: The update.
    """

    update: SharedUpdate
    _derivative: Tensor | None = field(default=None, init=False)  # over all layers that the pass has met so far
    _lost: Tensor | None = field(default=None, init=False)

    def radius(self, layer: Layer, inputs: Interval) -> Tensor:
        return self.update.radius(layer, inputs)

    def loss(self, layer: Layer, rows: Tensor, inputs: Interval, owners: Owners | None) -> Tensor:
        """What a layer adds to the loss of those met before, which may be negative."""
        # as in WeightBox: linear around the center of the inputs, and the rest, which is not shared
        center, flat = inputs.center, self.update.radii.flatten()
        moved = self.update.box(layer).radii
        spread = layer.apply_weight(center.abs() * gamma(layer.positions(rows)) + inputs.radius, moved)
        rest = loss(rows, spread * (1 + gamma(layer.terms)), owners)
        derivative = layer.gradient(by_image(rows, owners), center).flatten(2)
        factor = self.update.factor(layer)
        if factor is not None:
            derivative = derivative * factor.flatten()
        before = torch.zeros_like(rest) if self._lost is None else self._lost
        self._derivative = derivative if self._derivative is None else self._derivative + derivative
        self._lost = from_images(self._derivative.abs() @ flat, owners) * (1 + gamma(flat.numel()))
        # a difference may be much smaller than what it is taken of, which decides its rounding
        return self._lost - before + (self._lost + before) * (32 * UNIT) + rest


def shared_updates(
    masked: Network, masks: MaskSet, units: Mapping[str, Tensor], names: list[str], size: float
) -> dict[str, SharedUpdate]:
    """All updates of layers of both networks by at most `size`.

    Args:
        masked: The masked network.
        masks: Its masks.
        units: How far each weight of the dense network moves for size 1, by layer.
        names: The layers that are updated.
        size: The size of the update.
    """
    found = {}
    for name in names:
        radii = units[name] * (size * (1 + 4 * UNIT))
        kept = masks[name].kept().to(radii) if name in masks else None
        found[name] = SharedUpdate(radii, kept, masked.layers[name])
    return found


def proven_lead(
    networks: tuple[Network, Network], image: Tensor, changes: Mapping[str, SharedUpdate], label: int, optimise: bool
) -> Margin:
    """An upper bound of the dense margin where the networks differ, and what rounding is assumed; see `lead`.

    Args:
        networks: The dense network and the masked one.
        image: The input, without a batch dimension.
        changes: The updates.
        label: The class that the dense network predicts without an update.
        optimise: Whether to optimise slopes. Those inside the networks are not: they take most of the time for a few
            percent.
    """
    bounds = JointBounds(side_by_side(*networks), Interval(image[None], image[None]), changes)
    return Margin(bounds.lead(label, optimise), bounds.assumed[0])


class JointBounds(Bounds):
    """Bounds of a dense and a masked network side by side, for one image and all updates that they share."""

    def _operators_from(self, place: int) -> Sequence[Operator | None]:
        """Those of both networks, with what this pass adds up, if it meets both."""
        if (
            place != len(self.network.nodes) - 1
        ):  # all other nodes belong to one network, where there is nothing to share
            return self._operators
        shared = {
            name: SharedLoss(change) if isinstance(change, SharedUpdate) else change
            for name, change in self.changes.items()
        }
        return self._changed(shared)

    def lead(self, label: int, optimise: bool = True) -> float:
        """An upper bound of the dense network's margin after updates for which the masked one predicts another class.

        It is negative if there are none: then both predict the same class after every update. Let the dense network
        predict j and the masked one k. Its margin of j over k, m, is not positive. The dense margin is at most d, that
        of j over k, and so at most d - w m for every w >= 0, of which the smallest bound is taken; and it is at most
        that of j over `label`. Classes that a network never predicts, as `label` has a higher score, do not count.

        Args:
            label: The class that the dense network predicts without an update.
            optimise: Whether to optimise slopes below ReLUs. Default: True.
        """
        if bool(self.overflow.any()):
            return math.inf
        dense, masked = (self._predicted(label, network, optimise) for network in (0, 1))
        pairs = [(j, k) for j in dense for k in masked if j != k]
        if not pairs:
            return -math.inf
        best, weights = self._best_weights(pairs)
        if optimise:
            best = torch.maximum(best, self._each(self._rows(pairs, -1.0, weights), optimise))
        bounds: list[float] = best.tolist()
        return max(-max(bound, dense[j]) for (j, _), bound in zip(pairs, bounds, strict=True))

    def _predicted(self, label: int, network: int, optimise: bool) -> dict[int, float]:
        """The classes that a network may predict: `label`, and others with lower bounds of its margin over them."""
        low, high = (end[0].chunk(2)[network].tolist() for end in self.values[-1])
        others = [k for k in range(len(low)) if k != label and not low[label] > high[k]]
        found = {label: -math.inf}
        if others:
            rows = self._rows([(label, k) for k in others], 1.0 - network, float(network))
            bounds = self._each(rows, optimise).tolist()
            found |= {k: bound for k, bound in zip(others, bounds, strict=True) if not bound > 0}
        return found

    def _best_weights(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Lower bounds of w m - d for pairs of classes, and the weights w for which they were found."""
        best = torch.full((len(pairs),), -math.inf, dtype=torch.float64, device=self.values[-1].low.device)
        weights = torch.zeros_like(best)
        for tried in _WEIGHTS:
            best, weights = self._better(pairs, best, weights, torch.full_like(best, tried))
        for step in _CLOSER:
            middle = weights
            for sign in (1, -1):
                best, weights = self._better(pairs, best, weights, (middle + sign * step * (1 + middle)).clamp(min=0))
        return best, weights

    def _better(
        self, pairs: list[tuple[int, int]], best: Tensor, weights: Tensor, tried: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The better ones of two weights for each pair, with their bounds."""
        found = self._each(self._rows(pairs, -1.0, tried))
        return torch.maximum(best, found), torch.where(found > best, tried, weights)

    def _rows(self, pairs: list[tuple[int, int]], dense: float, masked: float | Tensor) -> Tensor:
        """Coefficients of margins of one class over another: factors of the dense one and of the masked one."""
        values = self.values[-1].low
        one, other = torch.tensor(pairs, device=values.device).T
        margins = torch.zeros(len(pairs), values.shape[1] // 2, dtype=values.dtype, device=values.device)
        margins.scatter_(1, one[:, None], 1.0).scatter_(1, other[:, None], -1.0)
        factor = masked[:, None] if isinstance(masked, Tensor) else masked
        return torch.cat([dense * margins, factor * margins], 1)

    def _each(self, rows: Tensor, optimise: bool = False) -> Tensor:
        """Lower bounds of rows, some at a time: derivatives by all weights of both networks are kept."""
        parts = rows.split(self._at_once(optimise=True))
        if optimise:
            return torch.cat([self.optimised(part, -1, None, _STEPS, _RATE) for part in parts])
        with torch.no_grad():
            return torch.cat([self.lower(part) for part in parts])
