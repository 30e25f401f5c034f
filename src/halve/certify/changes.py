"""How weights may change: every weight by a little, or the masks of a few blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halve.certify.operators import Change, Layer
from halve.certify.rounding import Interval, gamma
from halve.masks.mask import Mask

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


@dataclass(frozen=True, eq=False)
class BlockChanges(Change):
    """At most `count` blocks of the layer's mask may be replaced by other legal ones.

    Args:
        weight: The dense weight.
        mask: The mask that the layer has.
        count: How many blocks may change.
    """

    weight: Tensor
    mask: Mask
    count: int

    def radius(self, layer: Layer, inputs: Interval) -> Tensor:
        # at every position, the blocks that could matter most: each may change by all of its weights
        blocks, sizes = self._blocks, self._places(self.weight.abs())
        probe = layer.apply_weight(inputs.magnitude[None], layer.weight)[0]
        result = torch.zeros_like(probe).flatten(1) if probe.dim() > 1 else torch.zeros_like(probe)[:, None]
        patches = layer.patches(inputs.magnitude)  # (weights of a row, positions)
        columns = blocks % self.weight[0].numel()
        for row in range(len(blocks)):  # one row at a time, to bound the memory
            moved = (sizes[row][..., None] * patches[columns[row]]).sum(1)
            most = moved.topk(min(self.count, len(moved)), 0).values.sum(0)
            output = int(blocks[row, 0, 0]) // self.weight[0].numel()
            result[output] = torch.maximum(result[output], most)
        return result.reshape(probe.shape) * (1 + gamma(layer.terms))

    def loss(self, layer: Layer, rows: Tensor, inputs: Interval) -> Tensor:
        center, positions = inputs.center, layer.positions(rows)
        spread = center.abs() * gamma(positions) + inputs.radius
        kept, result = self.mask.layout.to_blocks(self.mask.kept()), []
        for part in rows.split(max(1, _MOST // self.weight.numel())):
            gained = self._places(layer.gradient(part, center) * self.weight)
            now = (gained * kept).sum(-1)
            least = gained.sort(-1).values[..., : self.mask.pattern.kept].sum(-1)
            beside = self._places(layer.gradient(part.abs(), spread) * self.weight.abs()).sum(-1)
            moved = (now - least + beside + gained.abs().sum(-1) * gamma(8)).flatten(1)
            result.append(moved.topk(min(self.count, moved.shape[1]), 1).values.sum(1))
        return torch.cat(result) * (1 + gamma(positions + self.count))

    @property
    def _blocks(self) -> Tensor:
        """The place in the flattened weight of each weight of each block, (rows, blocks, M); -1 for virtual columns."""
        places = torch.arange(self.weight.numel()).reshape(self.weight.shape)
        return self.mask.layout.to_blocks(places, fill=-1)

    def _places(self, values: Tensor) -> Tensor:
        """Values of the weight's shape, or several, in blocks, with 0 in virtual columns."""
        flat = values.reshape(*values.shape[: values.dim() - self.weight.dim()], -1)
        return torch.nn.functional.pad(flat, (0, 1))[..., self._blocks]


def _dot(rows: Tensor, vector: Tensor) -> Tensor:
    """An upper bound of dot products of numbers that are not negative."""
    return (rows.flatten(1) @ vector.reshape(-1)) * (1 + gamma(vector.numel()))
