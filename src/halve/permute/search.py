"""Search for a channel order whose blocks keep as much of a score as possible.

All swaps of two channels between two blocks are evaluated at once. A block that replaces one of its channels by another
one, a, keeps in each row the N-1 best of the others plus max(N-th best of the others, a). Since 2 max(p, q) = p + q +
|p - q|, the sums over rows for all pairs are L1 distances. The best swaps between disjoint pairs of blocks are made
together, until none helps. The search then escapes from the local optimum: it perturbs the order at random, climbs
again, and keeps the better result.
"""

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from halve.masks.pattern import Pattern

ESCAPES = 6
_PERTURBED = 0.02  # share of the channels that an escape moves
_LEAST = 1e-5  # relative gain below which a swap is rounding noise
_CHUNK = 1 << 24  # values sorted at once


@dataclass(frozen=True)
class Order:
    """A channel order, and the share of the score that blocks keep before and after."""

    order: Tensor
    kept_before: float
    kept_after: float
    finished: bool  # False if time ran out


def best_order(
    scores: Tensor, pattern: Pattern, *, seconds: float = 60.0, seed: int = 0, escapes: int = ESCAPES
) -> Order:
    """Find a good order of the channels.

    Args:
        scores: Non-negative scores of shape (rows, channels), with channels divisible by M.
        pattern: The N:M pattern.
        seconds: Time limit. Default: 60.
        seed: Seed of the random escapes.
        escapes: Number of escapes from local optima. Default: 6.

    >>> scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0]])
    >>> found = best_order(scores, Pattern("2:4"))
    >>> round(found.kept_before, 3), round(found.kept_after, 3)
    (0.559, 0.882)
    """
    columns = scores.detach().float().T.contiguous()  # (channels, rows)
    total = float(columns.sum())
    order = torch.arange(len(columns), device=columns.device)
    if total <= 0 or pattern.kept >= pattern.size or len(columns) <= pattern.size:
        kept = 1.0 if pattern.kept >= pattern.size or total <= 0 else _Search(columns, order, pattern).total / total
        return Order(order, kept, kept, True)
    deadline = time.monotonic() + seconds
    search = _Search(columns, order, pattern)
    before = search.total
    if not search.evaluate(torch.arange(len(order) // pattern.size, device=order.device), deadline):
        return Order(order, before / total, before / total, False)
    finished = search.climb(deadline)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(escapes if finished else 0):
        other = search.copy()
        other.perturb(generator)
        finished = other.climb(deadline)
        search = other if other.total > search.total else search
        if not finished:
            break
    return Order(_canonical(search.order, pattern.size), before / total, search.total / total, finished)


class _Search:
    """An order, and what each slot's block would keep with any other channel in that slot."""

    def __init__(self, columns: Tensor, order: Tensor, pattern: Pattern) -> None:
        self.columns, self.pattern = columns, pattern
        self.order = order.clone()
        self._sums = columns.sum(1)
        blocks = columns[order].reshape(-1, pattern.size, columns.shape[1])
        self._kept = blocks.topk(pattern.kept, dim=1).values.sum((1, 2))  # by each block now
        self._kept_with = columns.new_zeros(len(order), len(order))  # [slot, channel]

    @property
    def total(self) -> float:
        return float(self._kept.sum(dtype=torch.float64))

    def copy(self) -> "_Search":
        other = copy.copy(self)
        other.order, other._kept, other._kept_with = self.order.clone(), self._kept.clone(), self._kept_with.clone()
        return other

    def climb(self, deadline: float) -> bool:
        """Swap channels until no swap helps. Returns False if time runs out first."""
        size = self.pattern.size
        before = float("-inf")
        block_of = torch.arange(len(self.order), device=self.order.device) // size
        same = block_of[:, None] == block_of[None, :]
        while True:
            change = self._kept_with[:, self.order] - self._kept[block_of][:, None]
            gain = (change + change.T).masked_fill_(same, float("-inf"))
            swaps = _disjoint(gain, size, _LEAST * float(self._kept.mean()))
            if not swaps or not self.total > before:  # stop if the last gains were rounding errors
                return True
            before = self.total
            if time.monotonic() > deadline:
                return False
            first, second = torch.tensor(swaps, device=self.order.device).T
            self.order[first], self.order[second] = self.order[second], self.order[first]
            self.evaluate(torch.cat([first, second]).div(size, rounding_mode="floor").unique())

    def perturb(self, generator: torch.Generator) -> None:
        """Cycle a few random channels."""
        count = max(2, int(_PERTURBED * len(self.order)))
        slots = torch.randperm(len(self.order), generator=generator)[:count].to(self.order.device)
        self.order[slots] = self.order[slots.roll(1)]
        self.evaluate(slots.div(self.pattern.size, rounding_mode="floor").unique())

    def evaluate(self, stale: Tensor, deadline: float = float("inf")) -> bool:
        """Recompute what these blocks keep with every possible channel. Returns False if time runs out."""
        size, n = self.pattern.size, self.pattern.kept
        others = torch.tensor([[j for j in range(size) if j != slot] for slot in range(size)], device=stale.device)
        for part in stale.split(max(1, _CHUNK // (self.columns.shape[1] * size * size))):
            if time.monotonic() > deadline:
                return False
            members = self.columns[self.order.reshape(-1, size)[part]]  # (blocks, M, rows)
            self._kept[part] = members.topk(n, dim=1).values.sum((1, 2))
            best = members[:, others].topk(n, dim=2).values  # (blocks, M, N, rows): of a slot's neighbours
            level = best[:, :, n - 1].flatten(0, 1)  # the N-th best: what a newcomer must beat
            base = best[:, :, : n - 1].sum((2, 3)).flatten()
            distances = torch.cdist(level[None], self.columns[None], p=1.0)[0]
            slots = (part[:, None] * size + torch.arange(size, device=stale.device)).flatten()
            self._kept_with[slots] = base[:, None] + (level.sum(1)[:, None] + self._sums + distances) / 2
        return True


def _disjoint(gain: Tensor, size: int, least: float) -> list[tuple[int, int]]:
    """The best swaps, largest gain first, with each block in at most one."""
    count = len(gain) // size
    by_block = gain.reshape(count, size, count, size).permute(0, 2, 1, 3).reshape(count, count, size * size)
    value, where = by_block.max(2)
    top, index = value.triu(1).flatten().topk(min(8 * count, count * count))
    taken: set[int] = set()
    swaps = []
    places = where.flatten()[index].tolist()
    for amount, pair, place in zip(top.tolist(), index.tolist(), places, strict=True):
        if amount <= least:
            break
        a, b = divmod(pair, count)
        if a not in taken and b not in taken:
            taken |= {a, b}
            swaps.append((a * size + place // size, b * size + place % size))
    return swaps


def _canonical(order: Tensor, size: int) -> Tensor:
    """The same blocks, each sorted, in the order of their first channels: equal blocks give equal orders."""
    blocks = order.reshape(-1, size).sort(1).values
    return blocks[blocks[:, 0].argsort()].flatten()
