"""Improve a layer's codes block by block: each takes the code that costs least given all others."""

from dataclasses import dataclass

import torch
from torch import Tensor

SWEEPS = 6
_SETTLED = 1e-3  # a sweep that changes a smaller share of the codes is the last
_TOGETHER = 32  # blocks whose changes reach the other columns of a row in one multiplication


@dataclass(frozen=True)
class Cost:
    """What it costs to remove the part e of each row: e H e^T + 2 linear e^T + weight (offset + e along^T)^2.

    H is (columns, columns), `linear` and `along` are (rows, columns), `offset` and `weight` (rows).

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
        pull = removed @ self.products + 2 * self.linear
        return (pull * removed).sum(1) + self.weight * (self.offset + (removed * self.along).sum(1)).square()


def descend(
    weight: Tensor,
    codes: Tensor,
    cost: Cost,
    blocks: Tensor,
    table: Tensor,
    refused: Tensor | None = None,
) -> Tensor:
    """Better codes, (rows, blocks), for a weight of shape (rows, columns).

    `blocks` says which columns each block holds, (blocks, M); `table` what each code keeps, (codes, M); `refused` is
    True for codes that a block must not take, (blocks, codes).
    """
    codes, out = codes.clone(), (~table).to(weight.dtype)
    removed = torch.zeros_like(weight)
    removed[:, blocks.flatten()] = (weight[:, blocks] * out[codes]).flatten(1)
    for _ in range(SWEEPS):
        before = codes.clone()
        pull = removed @ cost.products + cost.linear
        lean = cost.offset + (removed * cost.along).sum(1)
        for start in range(0, len(blocks), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            columns = blocks[part].flatten()
            old = removed[:, columns]
            new, lean = _part(
                weight[:, columns],
                old,
                pull[:, columns],
                lean,
                codes[:, part],
                cost.products[columns][:, columns],
                cost.along[:, columns],
                cost.weight,
                out,
                None if refused is None else refused[part],
            )
            removed[:, columns] = new
            pull.addmm_(new - old, cost.products[columns])
        if (codes != before).float().mean() < _SETTLED:
            break
    return codes


def _part(
    weight: Tensor,
    removed: Tensor,
    pull: Tensor,
    lean: Tensor,
    codes: Tensor,
    products: Tensor,
    along: Tensor,
    stress: Tensor,
    out: Tensor,
    refused: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What is removed of some neighbouring blocks, and the rows' lean after that; writes `codes`."""
    size = out.shape[1]
    split = (len(weight), -1, 1, size)
    tried = weight.reshape(split) * out  # (rows, blocks, codes, M)
    inner = torch.stack([products[i : i + size, i : i + size] for i in range(0, len(products), size)])
    own = ((tried @ inner) * tried).sum(3)
    if refused is not None:
        own = own.masked_fill(refused, float("inf"))
    leans = (tried * along.reshape(split)).sum(3)
    removed, pull = removed.clone(), pull.clone()
    every = torch.arange(len(weight), device=weight.device)
    for index in range(codes.shape[1]):
        place = slice(index * size, (index + 1) * size)
        now = removed[:, place]
        others = lean - (now * along[:, place]).sum(1)
        outside = weight[:, place] * (pull[:, place] - now @ inner[index])
        leaning = (others[:, None] + leans[:, index]).square()
        code = (own[:, index] + 2 * outside @ out.T + stress[:, None] * leaning).argmin(1)
        best = tried[every, index, code]
        pull.addmm_(best - now, products[place])
        lean = others + leans[every, index, code]
        removed[:, place] = best
        codes[:, index] = code
    return removed, lean
