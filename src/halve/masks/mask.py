"""Mask and MaskSet: which weights are kept in each layer of a model."""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halve.errors import MaskError, listed
from halve.markup import table
from halve.masks import corrections as corrections_
from halve.masks.corrections import Corrections
from halve.masks.digests import Digests
from halve.masks.fingerprint import Fingerprint
from halve.masks.layout import Layout
from halve.masks.moves import Moves, checked
from halve.masks.pattern import Pattern

_CHUNK = 1 << 18  # codes checked at a time, to bound the memory


@dataclass(frozen=True, eq=False)
class Mask:
    """The codes of one layer. Every block is legal, and no kept place is wasted on a virtual column.

    Args:
        pattern: The N:M pattern.
        layout: How the weight is cut into blocks.
        stored_codes: Codes of shape (rows, blocks).
        fingerprint: What is known of the weight that the mask was made for, if anything.
        shared_with: Other layers that use the same weight.

    >>> layout = Layout("linear", (2, 8), block=4)
    >>> mask = Mask.from_scores(Pattern("2:4"), layout, torch.arange(16.0).reshape(2, 8))
    >>> mask.kept().int().tolist()[0]
    [0, 0, 1, 1, 0, 0, 1, 1]
    >>> mask.density
    0.5
    """

    pattern: Pattern
    layout: Layout
    stored_codes: Tensor = field(repr=False)
    fingerprint: Fingerprint | None = field(default=None, repr=False)
    shared_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        codes = self.stored_codes
        if self.pattern.size != self.layout.block:
            raise MaskError(f"pattern {self.pattern} does not fit blocks of {self.layout.block}")
        if tuple(codes.shape) != (self.layout.rows, self.layout.blocks):
            raise MaskError(
                f"expected codes of shape {(self.layout.rows, self.layout.blocks)}, got {tuple(codes.shape)}"
            )
        if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
            raise MaskError(f"codes must be integers, got {codes.dtype}")
        codes = codes.detach().cpu()
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.pattern.count:
            raise MaskError(f"{self.pattern} codes must be in 0..{self.pattern.count - 1}")
        object.__setattr__(self, "stored_codes", codes.to(self.pattern.dtype, copy=True))
        if self.layout.virtual:
            self._check_padding()

    def _check_padding(self) -> None:
        per_segment = self.layout.blocks // self.layout.segments
        wasted = self.pattern.wasteful(self.layout.block - self.layout.virtual)
        padded = self.stored_codes[:, per_segment - 1 :: per_segment].reshape(-1)
        if any(bool(wasted[codes.long()].any()) for codes in padded.split(_CHUNK)):
            raise MaskError("a virtual column is kept where a real weight could be")

    @classmethod
    def from_scores(cls, pattern: Pattern, layout: Layout, scores: Tensor) -> "Mask":
        """The mask that keeps the N highest scores of each block. `scores` has the weight's shape."""
        if not bool(scores.isfinite().all()):
            raise MaskError("scores must be finite")
        comparable = scores if scores.is_floating_point() else scores.double()
        return cls(pattern, layout, pattern.choose(layout.to_blocks(comparable, fill=float("-inf"))))

    @classmethod
    def from_kept(cls, pattern: Pattern, layout: Layout, kept: Tensor) -> "Mask":
        """The mask of a bool tensor of the weight's shape, True for kept. Raises if it is not legal."""
        mask = cls.from_scores(pattern, layout, kept)
        if not torch.equal(mask.kept(), kept.bool().cpu()):
            raise MaskError(f"not a legal {pattern} mask: every block must keep exactly {pattern.kept} weights")
        return mask

    @property
    def codes(self) -> Tensor:
        """A copy of the codes, (rows, blocks)."""
        return self.stored_codes.clone()

    @property
    def density(self) -> float:
        """Share of the real weights that are kept, from 0 to 1."""
        return self.kept_weights / self.layout.weights

    @property
    def kept_weights(self) -> int:
        """Number of real weights that are kept."""
        full, rest = divmod(self.layout.columns, self.layout.block)
        kept = full * self.pattern.kept + min(rest, self.pattern.kept)
        return kept * self.layout.segments * self.layout.rows

    def kept(self) -> Tensor:
        """Bool tensor of the weight's shape, True for kept."""
        return self.layout.from_blocks(self.pattern.decode(self.stored_codes))

    def apply_to(self, weight: Tensor) -> Tensor:
        """A copy of the weight, in its memory format, with zeros where nothing is kept."""
        zero = torch.zeros((), dtype=weight.dtype, device=weight.device)
        return torch.empty_like(weight).copy_(torch.where(self.kept().to(weight.device), weight, zero))

    def difference(self, other: "Mask") -> float:
        """Share of blocks in which the two masks differ."""
        if (self.pattern, self.layout) != (other.pattern, other.layout):
            raise MaskError("only masks of the same pattern and layout can be compared")
        return float((self.stored_codes != other.stored_codes).double().mean())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Mask)
            and (self.pattern, self.layout) == (other.pattern, other.layout)
            and (self.shared_with, self.fingerprint) == (other.shared_with, other.fingerprint)
            and torch.equal(self.stored_codes, other.stored_codes)
        )

    __hash__ = None  # type: ignore[assignment]


def wasteful(pattern: Pattern, layout: Layout) -> Tensor:
    """Codes that keep a virtual column where a real weight could be kept: bool, (blocks, codes).

    >>> wasteful(Pattern("2:4"), Layout("linear", (1, 3), 4, pad=True)).int().tolist()
    [[0, 0, 1, 0, 1, 1]]
    """
    per_segment = layout.blocks // layout.segments
    result = torch.zeros(layout.blocks, pattern.count, dtype=torch.bool)
    result[per_segment - 1 :: per_segment] = pattern.wasteful(layout.block - layout.virtual)
    return result


class MaskSet(Mapping[str, Mask]):
    """The masks of a model: a read-only mapping from layer names to masks.

    Args:
        masks: The masks by layer name.
        statistics: Recalibrated BatchNorm buffers by state-dict name, which `apply` copies into the model.
        recipe: How the masks were made, as plain JSON values.
        moves: How `apply` moves channels, by state-dict name. Empty unless permuted.
        digests: Digests of all tensors of the model that the masks were made for, if known.
        corrections: Learned scales and shifts of norms by state-dict name, which `apply` puts on: what they were before
            and what they become, stacked.

    >>> import halve
    >>> masks = halve.prune(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    >>> masks
    MaskSet(1 layer, 64 weights, 50.0 % kept)
    >>> masks.difference(masks)
    0.0
    """

    def __init__(
        self,
        masks: Mapping[str, Mask],
        statistics: Mapping[str, Tensor] | None = None,
        recipe: Mapping[str, Any] | None = None,
        moves: Moves | None = None,
        digests: Digests | None = None,
        corrections: Corrections | None = None,
    ) -> None:
        self._masks = dict(masks)
        self._moves = checked(moves or {})
        self._digests = digests
        if digests is not None:
            digests.check({name: mask.fingerprint for name, mask in self._masks.items()})
        self._statistics = {name: value.detach().cpu().clone() for name, value in (statistics or {}).items()}
        self._recipe = dict(recipe or {})
        self._corrections = corrections_.checked(corrections or {})

    def __getitem__(self, name: str) -> Mask:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskSet):
            return NotImplemented
        return (
            self._masks == other._masks
            and self._moves == other._moves
            and self._digests == other._digests
            and _equal(self._statistics, other._statistics)
            and _equal(self._corrections, other._corrections)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        layers = f"{len(self)} layer{'' if len(self) == 1 else 's'}"
        return f"MaskSet({layers}, {self.weights:,} weights, {self.density:.1%} kept)".replace("%", " %")

    def _repr_html_(self) -> str:
        """A table of the layers, for notebooks."""
        rows = [
            (name, str(mask.pattern), "x".join(map(str, mask.layout.shape)), f"{mask.layout.weights:,}")
            for name, mask in self.items()
        ]
        return table(repr(self), ("layer", "pattern", "shape", ">weights"), rows)

    @property
    def recipe(self) -> dict[str, Any]:
        """A copy of the record of how the masks were made, in plain JSON values."""
        return copy.deepcopy(self._recipe)

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Copies of the recalibrated BatchNorm buffers, by state-dict name."""
        return {name: value.clone() for name, value in self._statistics.items()}

    @property
    def corrections(self) -> dict[str, Tensor]:
        """Copies of the corrections of norms, by state-dict name: before and after, stacked."""
        return {name: value.clone() for name, value in self._corrections.items()}

    @property
    def moves(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """A copy of the channel orders that `apply` uses, by state-dict name and dimension."""
        return {name: dict(dims) for name, dims in self._moves.items()}

    @property
    def digests(self) -> Digests | None:
        """Digests of all tensors of the model that the masks were made for; None if unknown."""
        return self._digests

    @property
    def weights(self) -> int:
        """Number of weights in the masked layers, kept or not."""
        return sum(mask.layout.weights for mask in self.values())

    @property
    def density(self) -> float:
        """Share of the masked layers' weights that are kept, from 0 to 1."""
        return sum(mask.kept_weights for mask in self.values()) / self.weights if self else 1.0

    def differences(self, other: "MaskSet") -> dict[str, float]:
        """Share of blocks that differ, for each layer."""
        if alone := sorted(self.keys() ^ other.keys()):
            raise MaskError(f"only one of the two mask sets has {listed(alone)}; compare masks of the same layers")
        return {name: mask.difference(other[name]) for name, mask in self.items()}

    def difference(self, other: "MaskSet") -> float:
        """Share of all blocks that differ."""
        shares = self.differences(other)
        sizes = {name: mask.stored_codes.numel() for name, mask in self.items()}
        return sum(shares[name] * sizes[name] for name in sizes) / sum(sizes.values()) if sizes else 0.0

    def with_statistics(self, statistics: Mapping[str, Tensor]) -> "MaskSet":
        """The same masks with recalibrated BatchNorm buffers."""
        return self._with(statistics=statistics)

    def with_corrections(self, corrections: Corrections) -> "MaskSet":
        """The same masks with corrections of norms."""
        return self._with(corrections=corrections)

    def with_digests(self, digests: Digests) -> "MaskSet":
        """The same masks with digests of the model that they were made for."""
        return self._with(digests=digests)

    def without(self, names: Collection[str]) -> "MaskSet":
        """The same masks except those of `names`, which stay dense."""
        rest = {name: mask for name, mask in self.items() if name not in names}
        return self._with(masks=rest, digests=self._digests and self._digests.only(rest))

    def with_recipe(self, **entries: Any) -> "MaskSet":
        """The same masks with recipe entries added or replaced."""
        return self._with(recipe={**self._recipe, **entries})

    def _with(self, **changes: Any) -> "MaskSet":
        names = ("masks", "statistics", "recipe", "moves", "digests", "corrections")
        return MaskSet(**{name: getattr(self, f"_{name}") for name in names} | changes)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the masks to a file, customarily `NAME.masks.safetensors`, atomically. `halve.load` reads it.

        Args:
            path: File to write. An older mask file is replaced; anything else is not, such as the dense checkpoint.
            force: Replace an existing file, whatever it is. Default: False.
        """
        from halve.masks.file import save

        return save(self, path, force=force)


def _equal(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
