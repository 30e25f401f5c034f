"""How weights may change: every weight by a little, or the masks of a few blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halve.certify.memory import derivatives
from halve.certify.operators import Change, Layer
from halve.certify.rounding import UNIT, Interval, Owners, by_image, from_images, gamma, loss, per_row
from halve.masks.mask import Mask


@dataclass(frozen=True, eq=False)
class WeightBox(Change):
    """Every weight may move by at most its radius. Each weight is used at many positions, with the same change.

    Args:
        radii: The radius of each weight, of the weight's shape; 0 where the mask keeps nothing.
        scale: A factor of the radii for each image. Default: 1.
    """

    radii: Tensor
    scale: Tensor | None = None

    def only(self, images: Tensor) -> "WeightBox":
        return self if self.scale is None else WeightBox(self.radii, self.scale[images])

    def radius(self, layer: Layer, inputs: Interval) -> Tensor:
        moved = layer.apply_weight(inputs.magnitude, self.radii) * (1 + gamma(layer.terms))
        if self.scale is None:
            return moved
        return moved * (self.scale * (1 + 4 * UNIT)).reshape(-1, *[1] * (moved.dim() - 1))

    def loss(self, layer: Layer, rows: Tensor, inputs: Interval, owners: Owners | None) -> Tensor:
        found = self._loss(layer, rows, inputs, owners)
        return found if self.scale is None else found * per_row(self.scale * (1 + 4 * UNIT), owners)

    def _loss(self, layer: Layer, rows: Tensor, inputs: Interval, owners: Owners | None) -> Tensor:
        center, slack = inputs.center, 1 + gamma(layer.terms)
        positions = layer.positions(rows)
        if positions == 1:
            spread = layer.apply_weight(center.abs() + inputs.radius, self.radii)
            return loss(rows, spread * slack, owners)
        # around the center the loss is linear in the shared weights: sum over positions before taking absolute values
        spread = layer.apply_weight(center.abs() * gamma(positions) + inputs.radius, self.radii)
        flat, table = self.radii.reshape(-1), by_image(rows, owners)
        parts = [layer.gradient(some, center).flatten(2).abs() @ flat for some in _split(table, flat.numel())]
        linear = from_images(torch.cat(parts, 1), owners)
        return linear * (1 + gamma(flat.numel())) + loss(rows, spread * slack, owners)


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
        return torch.stack([self._radius(layer, size) for size in inputs.magnitude])

    def _radius(self, layer: Layer, size: Tensor) -> Tensor:
        # at every position, the blocks that could matter most: each may change by all of its weights
        blocks, sizes = self._blocks, self._places(self.weight.abs())
        probe = layer.apply_weight(size[None], layer.weight)[0]
        result = torch.zeros_like(probe).flatten(1) if probe.dim() > 1 else torch.zeros_like(probe)[:, None]
        patches = layer.patches(size[None])[0]  # (weights of a row, positions)
        columns = blocks % self.weight[0].numel()
        for row in range(len(blocks)):  # one row at a time, to bound the memory
            moved = (sizes[row][..., None] * patches[columns[row]]).sum(1)
            most = moved.topk(min(self.count, len(moved)), 0).values.sum(0)
            output = int(blocks[row, 0, 0]) // self.weight[0].numel()
            result[output] = torch.maximum(result[output], most)
        return result.reshape(probe.shape) * (1 + gamma(layer.terms))

    def loss(self, layer: Layer, rows: Tensor, inputs: Interval, owners: Owners | None) -> Tensor:
        positions = layer.positions(rows)
        kept, result = self.mask.layout.to_blocks(self.mask.kept()).to(rows.device), []
        center = inputs.center
        spread = center.abs() * gamma(positions) + inputs.radius
        for some in _split(by_image(rows, owners), self.weight.numel()):
            gained = self._places(layer.gradient(some, center) * self.weight)
            now = (gained * kept).sum(-1)
            least = gained.sort(-1).values[..., : self.mask.pattern.kept].sum(-1)
            beside = self._places(layer.gradient(some.abs(), spread) * self.weight.abs()).sum(-1)
            moved = (now - least + beside + gained.abs().sum(-1) * gamma(8)).flatten(2)
            result.append(moved.topk(min(self.count, moved.shape[2]), 2).values.sum(2))
        return from_images(torch.cat(result, 1), owners) * (1 + gamma(positions + self.count))

    @property
    def _blocks(self) -> Tensor:
        """The place in the flattened weight of each weight of each block, (rows, blocks, M); -1 for virtual columns."""
        places = torch.arange(self.weight.numel()).reshape(self.weight.shape)
        return self.mask.layout.to_blocks(places, fill=-1).to(self.weight.device)

    def _places(self, values: Tensor) -> Tensor:
        """Values of the weight's shape, or several, in blocks, with 0 in virtual columns."""
        flat = values.reshape(*values.shape[: values.dim() - self.weight.dim()], -1)
        return torch.nn.functional.pad(flat, (0, 1))[..., self._blocks]


def _split(table: Tensor, numbers: int) -> tuple[Tensor, ...]:
    """Rows of all images, (images, rows, ...), some at a time, if each takes so many numbers."""
    return torch.split(table, max(1, derivatives(table.device) // (numbers * len(table))), 1)
