"""Bounds of a network by backward linear relaxation (CROWN), with intervals inside it.

For every node an interval of its values is found. Where a tighter one pays, at the inputs of nonlinear operators, rows
of coefficients are carried back to the input of the network, and evaluated there. What no change can reach is computed
once: rows end there. Several images are bounded at once; each row belongs to one of them.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halve.certify.memory import coefficients, kept
from halve.certify.network import Network
from halve.certify.operators import Change, Changed, Layer, Operator, ReLU
from halve.certify.rounding import LARGEST, UNIT, Interval, Owners, around, dot, loss, per_row, total

TOLERANCE = 1e-9  # of the largest value of a node
_FEW = 32  # classes
_STEPS, _RATE = 20, 0.1  # of optimising slopes
STEPS_INSIDE, _RATE_INSIDE = 8, 0.25  # the same for intervals inside a network


class OutOfTime(Exception):
    """The bounds were not found within the time that was given."""


@dataclass
class Bounds:
    """Intervals of all nodes of a network, for all inputs in boxes, one per image, and all changes of its layers.

    Args:
        network: The network.
        box: The inputs, (images, ...).
        changes: How the weights of layers may change, by name.
        tighten: Whether to tighten intervals by backward passes. Default: True.
        steps: Steps of optimising slopes for these, where they leave the sign of a ReLU's input open. Default: 0.
        known: Intervals of all nodes that are known already, for the same boxes and changes. Default: none.
        splits: Signs of values, by node, (images, ...): only inputs and changes count for which these values are not
            negative (1) or not positive (-1); 0 where both count. Default: none.
        seconds: Time limit: afterwards `OutOfTime` is raised, or slopes are not optimised any more. Default: none.
    """

    network: Network
    box: Interval
    changes: Mapping[str, Change] = field(default_factory=dict)
    tighten: bool = True
    steps: int = 0
    known: Sequence[Interval] | None = None
    splits: Mapping[int, Tensor] = field(default_factory=dict)
    seconds: float = float("inf")
    values: list[Interval] = field(default_factory=list, init=False)
    fixed: list[bool] = field(default_factory=list, init=False)
    overflow: Tensor = field(init=False)  # images whose values exceed `LARGEST`: nothing is proven for them
    assumed: list[frozenset[str]] = field(init=False)  # per image, the modules from which on rounding is assumed
    _taken: list[Tensor] = field(default_factory=list, init=False)  # per node, for which images it is assumed
    _operators: list[Operator | None] = field(init=False)  # of all nodes, with the changes

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self.overflow = torch.zeros(len(self.box.low), dtype=torch.bool, device=self.box.low.device)
        self.assumed = [frozenset()] * len(self.box.low)
        nodes = self.network.nodes
        readers = {node.inputs[0]: node.operator for node in nodes if node.operator and node.operator.relaxes}
        self._operators = self._changed(self.changes)
        with torch.no_grad():
            for place, node in enumerate(nodes):
                if node.operator is None:
                    self.values.append(self.box)
                    self._taken.append(torch.zeros_like(self.overflow))
                    self.fixed.append(bool((self.box.low == self.box.high).all()))
                    continue
                changed = isinstance(self._operators[place], Changed)
                self.fixed.append(not changed and all(self.fixed[i] for i in node.inputs))
                self.values.append(self._finite(self._clipped(place, self._value(place))))
                reader = readers.get(place)
                if self.tighten and reader is not None and not self.fixed[place]:
                    self._tighten(place, reader.open(self.values[place]), self.steps if isinstance(reader, ReLU) else 0)

    def _late(self) -> bool:
        """Whether to stop tightening intervals. Those that are known need not be better, others must be."""
        late = time.monotonic() > self._deadline
        if late and not (self.steps and self.known is not None):
            raise OutOfTime
        return late

    def _value(self, place: int) -> Interval:
        """The interval of a node from those of its inputs.

        Intervals of rounding errors grow from layer to layer, although the errors do not. What no change reaches is
        therefore taken as float64 arithmetic computes it, within a tolerance, as soon as its interval is wider; so is
        what is computed from it, but nothing beside it.
        """
        node, operator = self.network.nodes[place], self._operators[place]
        assert operator is not None
        inputs = [self.values[i] for i in node.inputs]
        found = operator.interval(inputs)
        if self.known is not None and not self.fixed[place]:  # what is fixed says itself whether it is assumed
            before = self.known[place]
            low = torch.maximum(found.low, before.low)
            found = Interval(low, torch.maximum(low, torch.minimum(found.high, before.high)))
        inherited = torch.stack([self._taken[i] for i in node.inputs]).any(0)
        if not self.fixed[place]:
            self._taken.append(inherited)
            return found
        over = tuple(range(1, found.low.dim()))
        wide = (found.radius > TOLERANCE * found.magnitude.amax(over, keepdim=True)).flatten(1).any(1)
        for image in (wide & ~inherited).nonzero()[:, 0].tolist():
            self.assumed[image] |= {node.module or "the network itself"}
        assumed = wide | inherited
        self._taken.append(assumed)
        if not bool(assumed.any()):
            return found
        value = operator.value([x.center for x in inputs])
        taken = around(value, TOLERANCE * value.abs().amax(over, keepdim=True))
        assumed = assumed.reshape(-1, *[1] * len(over))
        return Interval(torch.where(assumed, taken.low, found.low), torch.where(assumed, taken.high, found.high))

    def _clipped(self, place: int, value: Interval) -> Interval:
        """The part of an interval that counts. If none is left, no input counts, and any bound holds."""
        if place not in self.splits:
            return value
        sign = self.splits[place]
        low = torch.where(sign > 0, value.low.clamp(min=0), value.low)
        high = torch.where(sign < 0, value.high.clamp(max=0), value.high)
        return Interval(low, torch.maximum(low, high))

    def _finite(self, value: Interval) -> Interval:
        """The interval, with zeros for images that overflow: comparisons with NaN would be wrong from there on."""
        good = (value.magnitude <= LARGEST).flatten(1).all(1)  # also false for NaN
        if bool(good.all()):
            return value
        self.overflow |= ~good
        good = good.reshape(-1, *[1] * (value.low.dim() - 1))
        return Interval(torch.where(good, value.low, 0.0), torch.where(good, value.high, 0.0))

    def _changed(self, changes: Mapping[str, Change]) -> list[Operator | None]:
        """The operators of all nodes, with changes of layers by name."""
        found: list[Operator | None] = []
        for node in self.network.nodes:
            operator = node.operator
            if isinstance(operator, Layer) and operator.name in changes:
                operator = Changed(operator, changes[operator.name])
            found.append(operator)
        return found

    def _operators_from(self, place: int) -> Sequence[Operator | None]:
        """The operators of all nodes, for one backward pass from a node."""
        return self._operators

    def _tighten(self, place: int, wanted: Tensor, steps: int) -> None:
        """Replace the interval of a node by the intersection with bounds from backward passes."""
        low, high = (end.clone(memory_format=torch.contiguous_format).flatten(1) for end in self.values[place])
        for images, at in _pairs(wanted, self._at_once(steps > 0) // 2):
            if self._late():
                break
            rows, owners = self._units(images, at, self.values[place].low.shape)
            found = (
                self.optimised(rows, place, owners, steps, _RATE_INSIDE) if steps else self.lower(rows, place, owners)
            )
            low[images, at] = torch.maximum(low[images, at], found[0::2])
            high[images, at] = torch.minimum(high[images, at], -found[1::2])
        shape = self.values[place].low.shape
        self.values[place] = Interval(low.reshape(shape), torch.maximum(low, high).reshape(shape))

    def _units(self, images: Tensor, at: Tensor, shape: torch.Size) -> tuple[Tensor, Owners | None]:
        """Rows that select values of images, each followed by its negative."""
        rows = torch.zeros(len(at), 2, shape[1:].numel(), dtype=torch.float64, device=at.device)
        rows.scatter_(2, at[:, None, None].expand(-1, 2, 1), rows.new_tensor([[[1.0], [-1.0]]]).expand(len(at), 2, 1))
        return rows.reshape(-1, *shape[1:]), Owners.of(images.repeat_interleave(2), shape[0])

    def _at_once(self, optimise: bool = False) -> int:
        """How many rows to carry back at a time: fewer if their gradient is needed."""
        sizes = [x.low[0].numel() for x, fixed in zip(self.values, self.fixed, strict=True) if not fixed]
        device, layers = self.box.low.device, self.network.layers
        if not optimise:
            return max(2, coefficients(device) // max(sizes, default=1))
        weights = sum(layer.weight.numel() for name in self.changes for layer in layers.get(name, []))
        return max(2, kept(device) // (sum(sizes) + weights))

    def lower(
        self,
        rows: Tensor,
        place: int = -1,
        owners: Owners | None = None,
        choices: "Choices | None" = None,
        seen: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """A lower bound of rows . value of a node, the last by default.

        Args:
            rows: Coefficients, (rows, ...).
            place: The node.
            owners: The images of the rows; not needed with one image.
            choices: What to use instead of slopes 0 and 1 below ReLUs, and multipliers of splits.
            seen: Where to keep the coefficients of ReLUs, by node.
        """
        nodes, place = self.network.nodes, place % len(self.network.nodes)
        waiting, constants = {place: rows}, [rows.new_zeros(len(rows))]
        operators, choices = self._operators_from(place), choices or Choices({}, {})
        for at in range(place, -1, -1):
            if at not in waiting:
                continue
            rows, node, operator, value = waiting.pop(at), nodes[at], operators[at], self.values[at]
            if at in choices.multipliers:  # what is taken off is not negative where the split holds
                rows = rows - per_row(self.splits[at], owners) * choices.multipliers[at].clamp(min=0)
                constants.append(-loss(rows, value.magnitude * (2 * UNIT), owners))
            if seen is not None and isinstance(operator, ReLU):
                seen[at] = rows
            if operator is None or self.fixed[at]:
                constants.append(dot(rows, value.low, value.high, 0.0, owners))
                continue
            inputs = [self.values[i] for i in node.inputs]
            parts, constant = operator.backward(rows, inputs, owners, choices.slopes.get(at))
            constants.append(constant)
            for i, part in zip(node.inputs, parts, strict=True):
                if i in waiting:
                    part = waiting[i] + part
                    constants.append(-loss(part, self.values[i].magnitude * (2 * UNIT), owners))
                waiting[i] = part
        found = total(constants)
        return torch.where(found.isnan(), -math.inf, found)

    def margins(self, labels: Sequence[int], optimise: bool = False) -> list[float]:
        """Lower bounds of how far the score of a class is above all others, per image; positive if it is predicted.

        Args:
            labels: The class of each image.
            optimise: Whether to optimise slopes where a first bound does not suffice. Default: False.
        """
        low, high = self.values[-1]
        images, classes = low.shape
        label = torch.tensor(labels, device=low.device)[:, None]
        own = low.gather(1, label)
        apart = (own - high) * (1 - 4 * UNIT) - (own.abs() + high.abs()) * UNIT
        others = torch.ones_like(apart, dtype=torch.bool).scatter(1, label, False)
        needed = others & (apart <= 0) if classes > _FEW else others  # intervals suffice to exclude most of many
        found = torch.where(others & ~needed, apart, math.inf).amin(1)
        for image, other in _pairs(needed, self._at_once()):
            rows = torch.zeros(len(other), classes, dtype=low.dtype, device=low.device)
            rows.scatter_(1, label[image], 1.0).scatter_(1, other[:, None], -1.0)
            owners = Owners.of(image, images)
            with torch.no_grad():
                bounds = self.lower(rows, -1, owners)
            wrong = bounds <= 0
            if optimise and bool(wrong.any()):
                some = Owners.of(image[wrong], images)
                bounds[wrong] = self.optimised(rows[wrong], -1, some, _STEPS, _RATE)
            found = found.scatter_reduce(0, image, bounds, "amin")
        return torch.where(self.overflow, -math.inf, found).tolist()

    def optimised(
        self,
        rows: Tensor,
        place: int,
        owners: Owners | None,
        steps: int,
        rate: float,
        start: "Choices | None" = None,
    ) -> Tensor:
        """Like `lower`, with slopes below ReLUs found by gradient descent (alpha-CROWN); never worse.

        Any slopes between 0 and 1 give a bound, and any multipliers that are not negative: what is used is clamped.

        Args:
            rows: Coefficients, (rows, ...).
            place: The node.
            owners: The images of the rows; not needed with one image.
            steps: Steps of the descent.
            rate: Its step size.
            start: Where it starts, and what it changes. Default: slopes 0 and 1.
        """
        with torch.no_grad():
            best = self.lower(rows, place, owners)
        choices = start or self.first_choices(rows, place, owners)
        free = [one.requires_grad_(True) for one in (*choices.slopes.values(), *choices.multipliers.values())]
        if not free:
            return best
        optimizer = torch.optim.Adam(free, lr=rate)
        for _ in range(steps):
            if bool((best > 0).all()):
                return best
            with torch.enable_grad():
                found = self.lower(rows, place, owners, choices)
                if not found.requires_grad:  # these ReLUs are in other branches
                    return best
                optimizer.zero_grad()
                (-found[best <= 0].sum()).backward()
            best = torch.maximum(best, found.detach())
            optimizer.step()
            choices.clamp_()
        with torch.no_grad():
            return torch.maximum(best, self.lower(rows, place, owners, choices))

    def first_choices(self, rows: Tensor, place: int, owners: Owners | None) -> "Choices":
        """Slopes 0 and 1 below the ReLUs up to a node that may have either sign, for each row."""
        slopes = {}
        for at, node in enumerate(self.network.nodes[: place % len(self.network.nodes) + 1]):
            if isinstance(node.operator, ReLU) and not self.fixed[at]:
                x = self.values[node.inputs[0]]
                if bool(node.operator.open(x).any()):
                    start = per_row((x.high > -x.low).to(x.low), owners)
                    slopes[at] = start.expand(len(rows), *start.shape[1:]).clone()
        return Choices(slopes, {})


@dataclass
class Choices:
    """What linear bounds leave open, for each row; a bound holds for whatever is chosen.

    Args:
        slopes: Slopes below ReLUs, by node, (rows, ...).
        multipliers: How much of a value whose sign is known by a split to take off, by node, (rows, ...).
    """

    slopes: dict[int, Tensor]
    multipliers: dict[int, Tensor]

    @torch.no_grad()
    def clamp_(self) -> None:
        """Keep them where they are used as they are."""
        for slope in self.slopes.values():
            slope.clamp_(0, 1)
        for multiplier in self.multipliers.values():
            multiplier.clamp_(min=0)


def _pairs(wanted: Tensor, most: int) -> list[tuple[Tensor, Tensor]]:
    """The images and places of wanted values, a limited number at a time, in the order of images."""
    found = wanted.flatten(1).nonzero()
    return [(part[:, 0], part[:, 1]) for part in found.split(max(1, most))] if len(found) else []
