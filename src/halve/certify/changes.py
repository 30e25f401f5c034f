"""How weights may change: every weight by a little, or the masks of a few blocks."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from halve.certify.operators import Change, Layer
from halve.certify.rounding import Interval, gamma

_MOST = 1 << 19  # numbers at a time, about as many as fit into a cache


@dataclass(frozen=True, eq=False)
class WeightBox(Change):
    """Every weight may move by at most its radius. Each weight is used at many positions, with the same change.

    Args:
        radii: The radius of each weight, of the weight's shape; 0 where the mask keeps nothing.
    """

    radii: Tensor

    def radius(self, layer: Layer, inputs: Interval) -> Tensor:
        return layer.apply_weight(inputs.magnitude[None], self.radii)[0] * (1 + gamma(layer.terms))

    def loss(self, layer: Layer, rows: Tensor, inputs: Interval) -> Tensor:
        center, slack = inputs.center, 1 + gamma(layer.terms)
        positions = layer.positions(rows)
        if positions == 1:
            spread = layer.apply_weight((center.abs() + inputs.radius)[None], self.radii)[0]
            return _dot(rows.abs(), spread * slack)
        # around the center the loss is linear in the shared weights: sum over positions before taking absolute values
        spread = layer.apply_weight((center.abs() * gamma(positions) + inputs.radius)[None], self.radii)[0]
        flat = self.radii.reshape(-1)
        parts = rows.split(max(1, _MOST // flat.numel()))
        linear = torch.cat([layer.gradient(part, center).flatten(1).abs() @ flat for part in parts])
        return linear * (1 + gamma(flat.numel())) + _dot(rows.abs(), spread * slack)


def _dot(rows: Tensor, vector: Tensor) -> Tensor:
    """An upper bound of dot products of numbers that are not negative."""
    return (rows.flatten(1) @ vector.reshape(-1)) * (1 + gamma(vector.numel()))


def rms(weights: Iterable[Tensor]) -> list[float]:
    """The root mean square of each weight."""
    return [float(weight.double().square().mean().sqrt()) for weight in weights]
