"""Coordinate descent over a layer's codes: each block in turn takes the cheapest code, given all others."""

from dataclasses import dataclass

import torch
from torch import Tensor

SWEEPS = 6
_SETTLED = 1e-3  # stop when a sweep changes a smaller share of the codes
_TOGETHER = 32  # blocks whose changes are propagated to the rest of the row in one matrix product


@dataclass(frozen=True)
class Cost:
    """The cost of removing e from each row: e H e^T + 2 linear e^T + weight (offset + e along^T)^2.

    Args:
        products: H, (columns, columns).
        linear: (rows, columns).
        along: (rows, columns).
        offset: (rows).
        weight: (rows).

    >>> one = torch.ones(1)
    >>> Cost(torch.eye(2), torch.zeros(1, 2), torch.ones(1, 2), -one, one).of(torch.tensor([[3.0, 0.0]]))
    tensor([13.])
    """

    products: Tensor
    linear: Tensor
    along: Tensor
    offset: Tensor
    weight: Tensor

    def of(self, removed: Tensor) -> Tensor:
        """The cost of each row."""
        gradient = removed @ self.products + 2 * self.linear
        return (gradient * removed).sum(1) + self.weight * (self.offset + (removed * self.along).sum(1)).square()


def coordinate_descent(
    weight: Tensor,
    codes: Tensor,
    cost: Cost,
    blocks: Tensor,
    table: Tensor,
    refused: Tensor | None = None,
) -> Tensor:
    """Improve the codes of a weight; returns codes of the same shape.

    Args:
        weight: Weight of shape (rows, columns).
        codes: Initial codes, (rows, blocks).
        cost: What removing weights costs.
        blocks: The columns of each block, (blocks, M).
        table: What each code keeps, bool (codes, M).
        refused: True for codes that a block must not take, (blocks, codes).
    """
    codes, out = codes.clone(), (~table).to(weight.dtype)
    removed = torch.zeros_like(weight)
    removed[:, blocks.flatten()] = (weight[:, blocks] * out[codes]).flatten(1)
    for _ in range(SWEEPS):
        before = codes.clone()
        gradient = removed @ cost.products + cost.linear
        shift = cost.offset + (removed * cost.along).sum(1)
        for start in range(0, len(blocks), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            columns = blocks[part].flatten()
            old = removed[:, columns]
            new, shift = _improve_(
                weight[:, columns],
                old,
                gradient[:, columns],
                shift,
                codes[:, part],
                cost.products[columns][:, columns],
                cost.along[:, columns],
                cost.weight,
                out,
                None if refused is None else refused[part],
            )
            removed[:, columns] = new
            gradient.addmm_(new - old, cost.products[columns])
        if (codes != before).float().mean() < _SETTLED:
            break
    return codes


def _improve_(
    weight: Tensor,
    removed: Tensor,
    gradient: Tensor,
    shift: Tensor,
    codes: Tensor,
    products: Tensor,
    along: Tensor,
    shift_weight: Tensor,
    out: Tensor,
    refused: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Improve the codes of some neighbouring blocks in place; returns what they remove, and the rows' new shift."""
    size = out.shape[1]
    split = (len(weight), -1, 1, size)
    tried = weight.reshape(split) * out  # (rows, blocks, codes, M)
    inner = torch.stack([products[i : i + size, i : i + size] for i in range(0, len(products), size)])
    own = ((tried @ inner) * tried).sum(3)
    if refused is not None:
        own = own.masked_fill(refused, float("inf"))
    shifts = (tried * along.reshape(split)).sum(3)
    removed, gradient = removed.clone(), gradient.clone()
    every = torch.arange(len(weight), device=weight.device)
    for index in range(codes.shape[1]):
        place = slice(index * size, (index + 1) * size)
        now = removed[:, place]
        others = shift - (now * along[:, place]).sum(1)
        outside = weight[:, place] * (gradient[:, place] - now @ inner[index])
        shifted = (others[:, None] + shifts[:, index]).square()
        code = (own[:, index] + 2 * outside @ out.T + shift_weight[:, None] * shifted).argmin(1)
        best = tried[every, index, code]
        gradient.addmm_(best - now, products[place])
        shift = others + shifts[every, index, code]
        removed[:, place] = best
        codes[:, index] = code
    return removed, shift
