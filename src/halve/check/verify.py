"""Is a model what its masks say: legal, eligible for sparse hardware, unchanged since the masks were made?"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Unpack

from torch import Tensor, nn

from halve.check.hardware import eligibility
from halve.errors import MaskError
from halve.masks.apply import check_fit, is_unchanged, updates_of
from halve.masks.fingerprint import digest
from halve.masks.layout import Layout, plain
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import fits, moved_back
from halve.masks.pattern import Pattern
from halve.modules import weight_of
from halve.select.select import SelectOptions, select

State = Literal["dense", "masked", "moved", "changed", "unknown"]


@dataclass(frozen=True)
class LayerCheck:
    """What is true of one layer.

    `state` compares the weight with what the mask was made for: the same "dense" weight, that weight already "masked",
    the same with its channels "moved", "changed" (then `update` is about how much, relatively), or "unknown" where
    nothing was recorded.
    """

    name: str
    pattern: Pattern
    legal: bool
    state: State
    update: float | None
    not_tensorrt: str | None  # why TensorRT cannot accelerate it, None if it can
    not_tensor_cores: str | None
    failure: str | None

    @property
    def unchanged(self) -> bool | None:
        """Whether the weight is what the mask was made for; None where nothing is known."""
        return None if self.state == "unknown" else self.state != "changed"


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`."""

    layers: tuple[LayerCheck, ...]

    @property
    def ok(self) -> bool:
        """No failures, and at least one layer checked."""
        return bool(self.layers) and not self.failures

    @property
    def not_accelerated(self) -> dict[str, str]:
        """Layers that sparse tensor cores cannot speed up, and why; no failures: such masks are legal all the same."""
        return {layer.name: layer.not_tensor_cores for layer in self.layers if layer.not_tensor_cores is not None}

    @property
    def failures(self) -> dict[str, str]:
        """What is wrong, by layer name."""
        return {layer.name: layer.failure for layer in self.layers if layer.failure is not None}


def verify(model: nn.Module, masks: MaskSet | None = None, **selection: Unpack[SelectOptions]) -> Verification:
    """Check a model, dense or with the masks already on it, against its masks.

    Without masks: check that the weights themselves are N:M sparse in every layer that `select` with these options
    would mask. The outcome has `.ok`, `.failures` and one entry per layer in `.layers`. Raises `MaskError` where the
    masks belong to another model. Masks with a channel order are checked in that order; a model whose channels were
    moved by `apply(permute=True)` is recognised.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> masks = halve.prune(model)
    >>> halve.verify(model, masks).ok, halve.verify(halve.apply(model, masks)).ok, halve.verify(model).ok
    (True, True, False)
    """
    if masks is not None:
        if selection:
            raise MaskError(f"verify takes masks or options of select, not both (got {', '.join(selection)})")
        weights = check_fit(model, masks)
        updates = updates_of(weights, masks)
        moves = {name: masks.moves.get(f"{name}.weight".lstrip("."), {}) for name in masks}
        moved = {name for name in updates if is_moved(weights[name], masks[name], moves[name])}
        checks = []
        for name, mask in masks.items():
            if name in moved:
                checks.append(_check_moved(name, mask, weights[name]))
            else:
                update = _least_update(weights[name], mask, moves[name], updates.get(name))
                check = _check_mask(name, mask, weights[name], update)
                if moved and moves[name] and check.failure is None:
                    check = dataclasses.replace(check, failure="its channels were not moved, those of others were")
                checks.append(check)
    else:
        chosen = select(model, **selection).masked
        checks = [
            _check_weight(c.name, c.pattern, c.layout, weight_of(model.get_submodule(c.name)))
            for c in chosen
            if c.pattern is not None and c.layout is not None
        ]
    return Verification(tuple(checks))


def _check_mask(name: str, mask: Mask, weight: Tensor, update: float | None) -> LayerCheck:
    state: State = "unknown"
    if mask.fingerprint is not None:
        state = "changed" if update is not None else "dense" if digest(weight) == mask.fingerprint.dense else "masked"
    kept = mask.kept()
    legal = illegal_blocks(mask.pattern, mask.layout, kept) == 0
    failure = None
    if not legal:
        failure = f"the mask keeps more than {mask.pattern}"
    elif (failure := _not_finite(weight)) is None and update is not None:
        failure = f"its weight changed by about {100 * update:.2g} % since the mask was made"
    in_order = plain(mask.layout).from_blocks(mask.pattern.decode(mask.stored_codes))  # as apply(permute=True) lays it
    able = eligibility(mask.layout.kind, mask.layout.groups, in_order)
    return LayerCheck(name, mask.pattern, legal, state, update, able.tensorrt, able.tensor_cores, failure)


def is_moved(weight: Tensor, mask: Mask, dims: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether the weight is the one that the mask was made for, with its channels moved."""
    return bool(dims) and fits(weight, dims) and is_unchanged(moved_back(weight, dims), mask)


def _least_update(
    weight: Tensor, mask: Mask, dims: Mapping[int, tuple[int, ...]], update: float | None
) -> float | None:
    """How large an update is, in the checkpoint's order or with the channels moved, whichever explains more."""
    if update is None or mask.fingerprint is None or not dims or not fits(weight, dims):
        return update
    return min(update, mask.fingerprint.update(moved_back(weight, dims)))


def _check_moved(name: str, mask: Mask, weight: Tensor) -> LayerCheck:
    return dataclasses.replace(_check_weight(name, mask.pattern, plain(mask.layout), weight), state="moved")


def _check_weight(name: str, pattern: Pattern, layout: Layout, weight: Tensor) -> LayerCheck:
    kept = weight.cpu() != 0
    bad = illegal_blocks(pattern, layout, kept)
    share = bad / (layout.rows * layout.blocks)
    failure = f"{100 * share:.3g} % of its blocks keep more than {pattern}" if bad else _not_finite(weight)
    able = eligibility(layout.kind, layout.groups, kept)
    return LayerCheck(name, pattern, not bad, "unknown", None, able.tensorrt, able.tensor_cores, failure)


def _not_finite(weight: Tensor) -> str | None:
    return None if bool(weight.isfinite().all()) else "its weight holds NaN or infinity"


def illegal_blocks(pattern: Pattern, layout: Layout, kept: Tensor) -> int:
    """How many blocks keep more than N."""
    return int((layout.to_blocks(kept.float()).sum(-1) > pattern.kept).sum())
