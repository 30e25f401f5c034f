"""Verify a model against its masks: legality, hardware support, and whether its weights have changed."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Unpack

from torch import Tensor, nn

from halve.check.hardware import eligibility
from halve.errors import OptionError, listed
from halve.masks.apply import check_fit, is_unchanged, updates_of
from halve.masks.fingerprint import digest
from halve.masks.layout import Layout, unpermuted
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import fits, moved_back
from halve.masks.pattern import Pattern
from halve.modules import unwrapped, weight_name, weight_of
from halve.select.select import SelectOptions, select

State = Literal["dense", "masked", "moved", "changed", "unknown"]


@dataclass(frozen=True)
class LayerCheck:
    """The outcome for one layer.

    `state` compares the weight with the one the mask was made for: the same "dense" weight, already "masked", with its
    channels "moved", "changed" (then `update` estimates the relative change), or "unknown" if nothing was recorded.
    """

    name: str
    pattern: Pattern
    legal: bool
    state: State
    update: float | None
    not_tensorrt: str | None  # why TensorRT cannot accelerate it; None if it can
    not_tensor_cores: str | None
    failure: str | None

    @property
    def unchanged(self) -> bool | None:
        """Whether the weight is the one the mask was made for; None if unknown."""
        return None if self.state == "unknown" else self.state != "changed"


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`, with one entry per layer."""

    layers: tuple[LayerCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether at least one layer was checked and none failed."""
        return bool(self.layers) and not self.failures

    @property
    def not_accelerated(self) -> dict[str, str]:
        """Layers that sparse tensor cores cannot accelerate, and why. Their masks are legal nevertheless."""
        return {layer.name: layer.not_tensor_cores for layer in self.layers if layer.not_tensor_cores is not None}

    @property
    def failures(self) -> dict[str, str]:
        """What is wrong, by layer name."""
        return {layer.name: layer.failure for layer in self.layers if layer.failure is not None}


def verify(model: nn.Module, masks: MaskSet | None = None, **selection: Unpack[SelectOptions]) -> Verification:
    """Verify a model, dense or already masked, against its masks.

    Without masks, verify that the weights themselves are N:M sparse. Masks with a channel order are checked in that
    order, and models whose channels `apply` has moved are recognised. Hardware support is judged on the tensors as they
    are, or for a dense model as `apply` will lay them out. Raises `MaskError` if the masks
    belong to another model.

    Args:
        model: The model. It is not changed.
        masks: Its masks, or None to check the weights alone.
        **selection: Without masks, the options of `select` that say which layers to check.

    Returns:
        An object with `.ok`, `.failures` by layer name, and one entry per layer in `.layers`.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> masks = halve.prune(model)
    >>> halve.verify(model, masks).ok, halve.verify(halve.apply(model, masks)).ok, halve.verify(model).ok
    (True, True, False)
    """
    model = unwrapped(model)
    if masks is not None:
        if selection:
            raise OptionError(f"verify accepts masks or options of select, not both; got masks and {listed(selection)}")
        weights = check_fit(model, masks)
        updates = updates_of(weights, masks)
        all_moves = masks.moves
        moves = {name: all_moves.get(weight_name(name), {}) for name in masks}
        moved = {name for name in updates if is_moved(weights[name], masks[name], moves[name])}
        checks = []
        for name, mask in masks.items():
            if name in moved:
                checks.append(_check_moved(name, mask, weights[name]))
            else:
                update = _least_update(weights[name], mask, moves[name], updates.get(name))
                check = _check_mask(name, mask, weights[name], update)
                if moved and moves[name] and check.failure is None:
                    check = dataclasses.replace(check, failure="its channels were not moved, but those of others were")
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
        failure = f"its mask keeps more than {mask.pattern}"
    elif (failure := _not_finite(weight)) is None and update is not None:
        failure = f"its weight changed by about {100 * update:.2g} % since the mask was made"
    if state == "masked":
        able = eligibility(mask.layout.kind, mask.layout.groups, weight.cpu() != 0)
    else:  # as `apply` will lay it out
        applied = unpermuted(mask.layout).from_blocks(mask.pattern.decode(mask.stored_codes))
        able = eligibility(mask.layout.kind, mask.layout.groups, applied)
    return LayerCheck(name, mask.pattern, legal, state, update, able.tensorrt, able.tensor_cores, failure)


def is_moved(weight: Tensor, mask: Mask, dims: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether the weight is the one the mask was made for, with its channels moved."""
    return bool(dims) and fits(weight, dims) and is_unchanged(moved_back(weight, dims), mask)


def _least_update(
    weight: Tensor, mask: Mask, dims: Mapping[int, tuple[int, ...]], update: float | None
) -> float | None:
    """The smaller of the updates that assume the checkpoint's channel order, or moved channels."""
    if update is None or mask.fingerprint is None or not dims or not fits(weight, dims):
        return update
    return min(update, mask.fingerprint.update(moved_back(weight, dims)))


def _check_moved(name: str, mask: Mask, weight: Tensor) -> LayerCheck:
    return dataclasses.replace(_check_weight(name, mask.pattern, unpermuted(mask.layout), weight), state="moved")


def _check_weight(name: str, pattern: Pattern, layout: Layout, weight: Tensor) -> LayerCheck:
    kept = weight.cpu() != 0
    bad = illegal_blocks(pattern, layout, kept)
    share = bad / (layout.rows * layout.blocks)
    failure = f"{100 * share:.3g} % of its blocks keep more than {pattern}" if bad else _not_finite(weight)
    able = eligibility(layout.kind, layout.groups, kept)
    return LayerCheck(name, pattern, not bad, "unknown", None, able.tensorrt, able.tensor_cores, failure)


def _not_finite(weight: Tensor) -> str | None:
    return None if bool(weight.isfinite().all()) else "its weight contains NaN or infinity"


def illegal_blocks(pattern: Pattern, layout: Layout, kept: Tensor) -> int:
    """The number of blocks that keep more than N."""
    return int((layout.to_blocks(kept.float()).sum(-1) > pattern.kept).sum())
