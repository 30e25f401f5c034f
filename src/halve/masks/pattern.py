"""N:M patterns, and the codes that number the legal choices within a block.

N of every M weights are *kept*. Codes follow the lexicographic order of the kept positions; for 2:4:

    code      0     1     2     3     4     5
    kept     0,1   0,2   0,3   1,2   1,3   2,3

Mask files store codes, so this order never changes.
"""

import functools
import itertools
import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halve.errors import PatternError

MAX_CODES = 65_536
MAX_SIZE = 256
_CHUNK = 1 << 20  # blocks sorted at a time, to bound the memory of `choose`
_TABLES = 2  # tables kept in memory: one takes up to 8 MB, and a file may name a thousand patterns


@dataclass(frozen=True, init=False, order=True)
class Pattern:
    """An N:M rule: N of every M weights are kept.

    Args:
        rule: "N:M" with 1 <= N <= M <= 256, such as "2:4"; or a Pattern.

    >>> p = Pattern("2:4")
    >>> p.kept, p.size, p.count
    (2, 4, 6)
    >>> p.table().int().tolist()[:3]
    [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    >>> p.choose(torch.tensor([[0.1, 0.9, 0.5, 0.3]])).tolist()
    [3]
    """

    kept: int
    size: int

    def __init__(self, rule: "str | Pattern") -> None:
        if isinstance(rule, Pattern):
            kept, size = rule.kept, rule.size
        else:
            match = re.fullmatch("(0|[1-9][0-9]{0,3}):(0|[1-9][0-9]{0,3})", rule) if isinstance(rule, str) else None
            if match is None:
                raise PatternError(f"pattern must have the form 'N:M' (N kept of every M), such as '2:4'; got {rule!r}")
            kept, size = int(match[1]), int(match[2])
        if not 1 <= kept <= size <= MAX_SIZE:
            raise PatternError(
                f"pattern '{kept}:{size}' keeps {kept} of every {size} weights: N must be between 1 and M, and M at "
                f"most {MAX_SIZE}"
            )
        if (count := math.comb(size, kept)) > MAX_CODES:
            raise PatternError(
                f"pattern '{kept}:{size}' has {count:,} legal choices per block, more than the supported "
                f"{MAX_CODES:,}; use a smaller M, such as '2:4' (6 choices) or '4:8' (70)"
            )
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "size", size)

    def __str__(self) -> str:
        return f"{self.kept}:{self.size}"

    def __repr__(self) -> str:
        return f"Pattern('{self}')"

    @property
    def count(self) -> int:
        """Number of legal choices per block: C(M, N)."""
        return math.comb(self.size, self.kept)

    @property
    def bits(self) -> int:
        """Bits per code in a file."""
        return max(1, (self.count - 1).bit_length())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of code tensors."""
        return torch.uint8 if self.count <= 256 else torch.int32

    def table(self) -> Tensor:
        """All choices as bool, (count, M): row i is code i, True means kept."""
        return _table(self).clone()

    def wasteful(self, real: int) -> Tensor:
        """Which codes keep a position from `real` on where one before it could be kept: bool, (count,).

        >>> Pattern("2:4").wasteful(3).int().tolist()
        [0, 0, 1, 0, 1, 1]
        """
        table = _table(self)
        return table[:, real:].any(1) if self.kept <= real else ~table[:, :real].all(1)

    def decode(self, codes: Tensor) -> Tensor:
        """Turn codes of any shape into a bool tensor of shape `(*codes.shape, M)`, True for kept."""
        return _table(self).to(codes.device)[codes.long()]

    def encode(self, kept: Tensor) -> Tensor:
        """The inverse of `decode`: codes for a bool tensor of shape (..., M)."""
        if kept.shape[-1:] != (self.size,) or not bool((kept.sum(-1) == self.kept).all()):
            raise PatternError(f"cannot encode: every block must keep exactly {self.kept} of {self.size} weights")
        return self.rank(kept.nonzero()[:, -1].reshape(*kept.shape[:-1], self.kept))

    def choose(self, scores: Tensor) -> Tensor:
        """The codes that keep the N highest scores of each block. Ties go to the lower position.

        Args:
            scores: Tensor of shape (..., M) without NaN.
        """
        flat = scores.reshape(-1, self.size)
        codes = [self.rank(self._best(part)) for part in torch.split(flat, _CHUNK)]
        return torch.cat(codes).reshape(scores.shape[:-1]) if codes else flat.new_empty(0, dtype=self.dtype)

    def _best(self, scores: Tensor) -> Tensor:
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        return ranked[:, : self.kept].sort(dim=-1).values

    def rank(self, positions: Tensor) -> Tensor:
        """The codes of ascending kept positions, (..., N): their lexicographic rank."""
        rank = _rank_table(self).to(positions.device)
        steps = torch.arange(self.kept, device=positions.device)
        return (self.count - 1 - rank[steps, positions].sum(-1)).to(self.dtype)


@functools.lru_cache(_TABLES)
def _table(pattern: Pattern) -> Tensor:
    # List the kept or the dropped positions, whichever are fewer: 254:256 has 8 million kept ones. Where kept positions
    # are in lexicographic order, the dropped ones are in reverse order.
    few = min(pattern.kept, pattern.size - pattern.kept)
    positions = itertools.chain.from_iterable(itertools.combinations(range(pattern.size), few))
    listed = np.fromiter(positions, np.int64, pattern.count * few).reshape(pattern.count, few)
    marked = torch.zeros(pattern.count, pattern.size, dtype=torch.bool)
    marked.scatter_(1, torch.from_numpy(listed), True)
    return marked if few == pattern.kept else ~marked.flip(0)


@functools.lru_cache(_TABLES)
def _rank_table(pattern: Pattern) -> Tensor:
    """Entry (i, p): how many choices come later when the i-th kept position is p."""
    n, m = pattern.kept, pattern.size
    # Entries that no ascending choice reaches can be huge, but are never read: clamp them.
    return torch.tensor([[min(math.comb(m - 1 - p, n - i), MAX_CODES) for p in range(m)] for i in range(n)])
