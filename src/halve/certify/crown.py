"""Bounds of a network by backward linear relaxation (CROWN), with intervals inside it.

For every node an interval of its values is found. Where a tighter one pays, at the inputs of nonlinear operators, rows
of coefficients are carried back to the input of the network, and evaluated there. What no change can reach is computed
once: rows end there.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halve.certify.network import Network
from halve.certify.operators import Change, Layer, ReLU
from halve.certify.rounding import UNIT, Interval, around, dot, total

_ROWS = 1 << 21  # coefficients at a time, about as many as fit into a cache
TOLERANCE = 1e-9  # of the largest value of a node
_FEW = 32  # classes
_STEPS, _RATE = 20, 0.1  # of optimising slopes


class OutOfTime(Exception):
    """The bounds were not found within the time that was given."""


@dataclass
class Bounds:
    """Intervals of all nodes of a network, for all inputs in a box and all changes of its layers.

    Args:
        network: The network.
        box: The inputs, without a batch dimension.
        changes: How the weights of layers may change, by name.
        tighten: Whether to tighten intervals by backward passes. Default: True.
        seconds: Time limit. Default: none.
    """

    network: Network
    box: Interval
    changes: Mapping[str, Change] = field(default_factory=dict)
    tighten: bool = True
    seconds: float = float("inf")
    values: list[Interval] = field(default_factory=list, init=False)
    fixed: list[bool] = field(default_factory=list, init=False)
    overflow: bool = field(default=False, init=False)  # whether values exceed the range of float64: nothing is proven
    assumed: str = field(default="", init=False)  # the module from which on rounding before changed layers is assumed

    def __post_init__(self) -> None:
        deadline = time.monotonic() + self.seconds
        nodes = self.network.nodes
        readers = {node.inputs[0]: node.operator for node in nodes if node.operator and node.operator.relaxes}
        with torch.no_grad():
            for place, node in enumerate(nodes):
                if node.operator is None:
                    self.values.append(self.box)
                    self.fixed.append(bool((self.box.low == self.box.high).all()))
                    continue
                self._set_change(node.operator)
                changed = isinstance(node.operator, Layer) and node.operator.change is not None
                self.fixed.append(not changed and all(self.fixed[i] for i in node.inputs))
                self.values.append(self._value(place))
                reader = readers.get(place)
                if self.tighten and reader is not None and not self.fixed[place]:
                    self._tighten(place, reader.open(self.values[place]), deadline)
                if not all(bool(end.isfinite().all()) for end in self.values[place]):
                    self.overflow = True  # comparisons with NaN would be wrong from here on
                    break
                if time.monotonic() > deadline:
                    raise OutOfTime

    def _value(self, place: int) -> Interval:
        """The interval of a node from those of its inputs.

        Intervals of rounding errors grow from layer to layer, although the errors do not. What no change reaches is
        therefore taken as float64 arithmetic computes it, within a tolerance, as soon as its interval is wider.
        """
        node = self.network.nodes[place]
        assert node.operator is not None
        inputs = [self.values[i] for i in node.inputs]
        if not self.fixed[place]:
            return node.operator.interval(inputs)
        if not self.assumed:
            found = node.operator.interval(inputs)
            if bool((found.radius <= TOLERANCE * found.magnitude.max()).all()):
                return found
            self.assumed = node.module or "the network itself"
        value = node.operator.value([x.center for x in inputs])
        return around(value, TOLERANCE * value.abs().max())

    def _set_change(self, operator: object) -> None:
        if isinstance(operator, Layer):
            operator.change = self.changes.get(operator.name)

    def _tighten(self, place: int, wanted: Tensor, deadline: float) -> None:
        """Replace the interval of a node by the intersection with bounds from backward passes."""
        low, high = self.values[place]
        low, high = low.clone(memory_format=torch.contiguous_format), high.clone(memory_format=torch.contiguous_format)
        indices = wanted.flatten().nonzero()[:, 0]
        if not len(indices):
            return
        for chunk in indices.split(max(1, _ROWS // (2 * self._largest))):
            rows = torch.zeros(len(chunk), low.numel(), dtype=low.dtype, device=low.device)
            rows[torch.arange(len(chunk)), chunk] = 1
            rows = rows.reshape(len(chunk), *low.shape)
            found = self.lower(torch.cat([rows, -rows]), place)
            low.view(-1)[chunk] = torch.maximum(low.view(-1)[chunk], found[: len(chunk)])
            high.view(-1)[chunk] = torch.minimum(high.view(-1)[chunk], -found[len(chunk) :])
            if time.monotonic() > deadline:
                raise OutOfTime
        self.values[place] = Interval(low, torch.maximum(low, high))

    @property
    def _largest(self) -> int:
        return max((x.low.numel() for x, fixed in zip(self.values, self.fixed, strict=True) if not fixed), default=1)

    def lower(self, rows: Tensor, place: int = -1, slopes: Mapping[int, Tensor] | None = None) -> Tensor:
        """A lower bound of rows . value of a node, the last by default.

        Args:
            rows: Coefficients, (rows, ...).
            place: The node.
            slopes: Slopes below ReLUs to use instead of 0 and 1, by node, each (...) or (rows, ...).
        """
        nodes, place = self.network.nodes, place % len(self.network.nodes)
        waiting, constants = {place: rows}, [rows.new_zeros(len(rows))]
        for at in range(place, -1, -1):
            if at not in waiting:
                continue
            rows, node, value = waiting.pop(at), nodes[at], self.values[at]
            if node.operator is None or self.fixed[at]:
                constants.append(dot(rows, value.low, value.high))
                continue
            self._set_change(node.operator)
            inputs = [self.values[i] for i in node.inputs]
            parts, constant = node.operator.backward(rows, inputs, (slopes or {}).get(at))
            constants.append(constant)
            for i, part in zip(node.inputs, parts, strict=True):
                if i in waiting:
                    part = waiting[i] + part
                    nothing = torch.zeros_like(self.values[i].low)
                    constants.append(dot(part, nothing, nothing, self.values[i].magnitude * (2 * UNIT)))
                waiting[i] = part
        found = total(constants)
        return torch.where(found.isnan(), -math.inf, found)

    def margin(self, label: int, optimise: bool = False) -> float:
        """A lower bound of how far the score of a class is above all others; positive if it must be predicted.

        Args:
            label: The class.
            optimise: Whether to optimise slopes where a first bound does not suffice. Default: False.
        """
        if self.overflow:
            return -math.inf
        low, high = self.values[-1]
        with torch.no_grad():
            apart = (low[label] - high) * (1 - 4 * UNIT) - (low[label].abs() + high.abs()) * UNIT
        classes = torch.arange(len(low), device=low.device)
        others = classes != label
        needed = others & (apart <= 0) if len(low) > _FEW else others  # intervals suffice to exclude most of many
        open_, closed = classes[needed], apart[others & ~needed]
        found = [float(closed.min())] if len(closed) else []
        for part in open_.split(max(1, _ROWS // (2 * self._largest))) if len(open_) else ():
            rows = torch.zeros(len(part), len(low), dtype=low.dtype, device=low.device)
            rows[:, label] = 1
            rows[torch.arange(len(part)), part] -= 1
            with torch.no_grad():
                bounds = self.lower(rows)
            if optimise and bool((bounds <= 0).any()):
                wrong = bounds <= 0
                bounds[wrong] = self.optimised(rows[wrong])
            found.append(float(bounds.min()))
        return min(found)

    def optimised(self, rows: Tensor, steps: int = _STEPS) -> Tensor:
        """Like `lower`, with slopes below ReLUs found by gradient descent (alpha-CROWN); never worse."""
        with torch.no_grad():
            best = self.lower(rows)
        nodes, slopes = self.network.nodes, {}
        for at, node in enumerate(nodes):
            if isinstance(node.operator, ReLU) and not self.fixed[at]:
                x = self.values[node.inputs[0]]
                if bool(node.operator.open(x).any()):
                    start = (x.high > -x.low).to(x.low)
                    slopes[at] = start.expand(len(rows), *start.shape).clone().requires_grad_(True)
        if not slopes:
            return best
        optimizer = torch.optim.Adam(slopes.values(), lr=_RATE)
        for _ in range(steps):
            if bool((best > 0).all()):
                break
            with torch.enable_grad():
                found = self.lower(rows, slopes=slopes)
                optimizer.zero_grad()
                (-found.sum()).backward()
            best = torch.maximum(best, found.detach())
            optimizer.step()
            with torch.no_grad():
                for slope in slopes.values():
                    slope.clamp_(0, 1)
        with torch.no_grad():
            return torch.maximum(best, self.lower(rows, slopes=slopes))


def proven_margin(
    network: Network,
    box: Interval,
    changes: Mapping[str, Change],
    label: int,
    optimise: bool,
    seconds: float = math.inf,
) -> tuple[float, str]:
    """A lower bound of the margin of a class, and the module from which on rounding is assumed, if any.

    Bounds with intervals inside take a fraction of the time: others are computed only where these do not suffice.
    """
    quick = Bounds(network, box, changes, tighten=False, seconds=seconds)
    margin = quick.margin(label)
    if margin > 0:
        return margin, quick.assumed
    return Bounds(network, box, changes, seconds=seconds).margin(label, optimise), quick.assumed
