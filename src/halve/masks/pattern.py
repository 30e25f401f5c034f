"""Pattern: the N:M rule, and the codes that number its legal choices.

N of every M weights are *kept*. A code numbers one legal choice within a block. Codes follow the lexicographic order of
the kept positions; for 2:4 that is

    code      0     1     2     3     4     5
    kept     0,1   0,2   0,3   1,2   1,3   2,3

and this order never changes, since mask files store codes.
"""

import functools
import itertools
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from halve.errors import PatternError

MAX_CODES = 65_536
MAX_SIZE = 256
_CHUNK = 1 << 20  # blocks sorted at a time: bounds the memory of `choose` on very wide layers


@dataclass(frozen=True, init=False, order=True)
class Pattern:
    """N kept of every M weights.

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
            match = re.fullmatch(r"(\d{1,4}):(\d{1,4})", rule) if isinstance(rule, str) else None
            if match is None:
                raise PatternError(f"pattern {rule!r} is not of the form 'N:M', N kept of every M, such as '2:4'")
            kept, size = int(match[1]), int(match[2])
        if not 1 <= kept <= size <= MAX_SIZE:
            raise PatternError(
                f"pattern '{kept}:{size}' keeps {kept} of every {size}: N must be from 1 to M, M at most {MAX_SIZE}"
            )
        if (count := math.comb(size, kept)) > MAX_CODES:
            raise PatternError(
                f"pattern '{kept}:{size}' has {count:,} legal choices per block, more than the {MAX_CODES:,} that "
                f"can be numbered; take a smaller M, such as '2:4' (6 choices) or '4:8' (70)"
            )
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "size", size)

    def __str__(self) -> str:
        return f"{self.kept}:{self.size}"

    def __repr__(self) -> str:
        return f"Pattern('{self}')"

    @property
    def count(self) -> int:
        """How many legal choices a block has: C(M, N)."""
        return math.comb(self.size, self.kept)

    @property
    def bits(self) -> int:
        """Bits that one code takes in a file."""
        return max(1, (self.count - 1).bit_length())

    @property
    def dtype(self) -> torch.dtype:
        """The type of code tensors."""
        return torch.uint8 if self.count <= 256 else torch.int32

    def table(self) -> Tensor:
        """All choices, bool of shape (count, M); row i is code i, True is kept."""
        return _table(self).clone()

    def decode(self, codes: Tensor) -> Tensor:
        """Codes of any shape -> kept, bool of shape (*codes, M)."""
        return _table(self).to(codes.device)[codes.long()]

    def encode(self, kept: Tensor) -> Tensor:
        """Kept, bool of shape (..., M) -> codes; the inverse of `decode`."""
        if kept.shape[-1:] != (self.size,) or not bool((kept.sum(-1) == self.kept).all()):
            raise PatternError(f"cannot encode: every block must keep exactly {self.kept} of {self.size} weights")
        positions = kept.nonzero()[:, -1].reshape(*kept.shape[:-1], self.kept)
        return self._rank(positions)

    def choose(self, scores: Tensor) -> Tensor:
        """The code that keeps the N highest scores of each block; ties go to the lower position.

        scores: (..., M), no NaN -> codes (...).
        """
        flat = scores.reshape(-1, self.size)
        codes = [self._rank(self._best(part)) for part in torch.split(flat, _CHUNK)]
        return torch.cat(codes).reshape(scores.shape[:-1]) if codes else flat.new_empty(0, dtype=self.dtype)

    def _best(self, scores: Tensor) -> Tensor:
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        return ranked[:, : self.kept].sort(dim=-1).values

    def _rank(self, positions: Tensor) -> Tensor:
        """Lexicographic rank of ascending kept positions (..., N)."""
        rank = _rank_table(self).to(positions.device)
        steps = torch.arange(self.kept, device=positions.device)
        return (self.count - 1 - rank[steps, positions].sum(-1)).to(self.dtype)


@functools.cache
def _table(pattern: Pattern) -> Tensor:
    table = torch.zeros(pattern.count, pattern.size, dtype=torch.bool)
    chosen = torch.tensor(list(itertools.combinations(range(pattern.size), pattern.kept)))
    return table.scatter_(1, chosen, True)


@functools.cache
def _rank_table(pattern: Pattern) -> Tensor:
    """Entry (i, p): how many later choices the i-th kept position at p leaves behind it."""
    n, m = pattern.kept, pattern.size
    # Entries that no ascending choice reaches can be astronomically large; they are never read.
    return torch.tensor([[min(math.comb(m - 1 - p, n - i), MAX_CODES) for p in range(m)] for i in range(n)])
