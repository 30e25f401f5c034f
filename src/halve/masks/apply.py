"""Apply a MaskSet to a copy of a model."""

import difflib
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from halve.errors import ChangedWeightsWarning, MaskError, OptionError, listed
from halve.masks.fingerprint import digest
from halve.masks.layout import unpermuted
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import move_
from halve.modules import clone, kind_of, set_weight_, weight_of

OnChanged = Literal["warn", "error", "ignore"]


def apply(model: nn.Module, masks: MaskSet, *, permute: bool = False, on_changed: OnChanged = "warn") -> nn.Module:
    """Return a copy of the model with zeros where the masks keep nothing.

    The copy is a plain module of the same class with the same state-dict names. Recalibrated BatchNorm statistics in
    `masks` are copied into it. A masked layer under weight_norm or spectral_norm gets a plain weight, since
    renormalising would change the kept weights.

    Args:
        model: The dense model. It is not changed.
        masks: Its masks.
        permute: Reorder the channels of the copy so that every block is contiguous, as kernels and exported models
            need it. The outputs stay the same up to rounding, but the weights are no longer in the checkpoint's order.
            Only matters for masks made with `permute=True`. Default: False.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default) about how much
            each layer changed, "error" or "ignore".

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> sparse = halve.apply(model, halve.prune(model))
    >>> int((sparse[0].weight == 0).sum()), int((model[0].weight == 0).sum())
    (32, 0)
    """
    if on_changed not in ("warn", "error", "ignore"):
        raise OptionError(f"on_changed must be 'warn', 'error' or 'ignore', got {on_changed!r}")
    weights = check_fit(model, masks)
    if on_changed != "ignore" and (updates := updates_of(weights, masks)):
        message = _changed_message(updates)
        if on_changed == "error":
            raise MaskError(f"{message}; on_changed='warn' applies the masks anyway")
        warnings.warn(message, ChangedWeightsWarning, stacklevel=2)
    copy = clone(model)
    for name, mask in masks.items():
        set_weight_(copy.get_submodule(name), mask.apply_to(weights[name]))
    _copy_statistics_(copy, masks.statistics)
    if permute:
        move_(copy, masks.moves)
        _check_contiguous(copy, masks)
    return copy


def _check_contiguous(copy: nn.Module, masks: MaskSet) -> None:
    """Raise if a block of the permuted copy keeps more than N weights."""
    for name, mask in masks.items():
        blocks = unpermuted(mask.layout).to_blocks(weight_of(copy.get_submodule(name)) != 0)
        if int(blocks.sum(-1).max()) > mask.pattern.kept:
            raise MaskError(
                f"layer {name} has a channel order, but the mask set does not say how to move the channels; use masks "
                f"from prune(permute=True) or learn(permute=True)"
            )


def check_fit(model: nn.Module, masks: MaskSet) -> dict[str, Tensor]:
    """The weights of the masked layers, by layer name. Raises if a mask does not fit its layer."""
    if not isinstance(masks, MaskSet):
        raise MaskError(
            f"masks must be a MaskSet from halve.learn, halve.prune or halve.load; got {type(masks).__name__}"
        )
    modules = dict(model.named_modules())
    if missing := [name for name in masks if name not in modules]:
        near = difflib.get_close_matches(missing[0], modules, n=3)
        raise MaskError(
            f"the masks are for another model: {type(model).__name__} has no layer {listed(missing)}"
            + (f" (did you mean {' or '.join(near)}?)" if near else "")
        )
    weights = {}
    for name, mask in masks.items():
        module = modules[name]
        if kind_of(module) != mask.layout.kind:
            raise MaskError(
                f"layer {name} is a {type(module).__name__}, but its mask is for a {mask.layout.kind} layer"
            )
        weight = weight_of(module)
        if tuple(weight.shape) != mask.layout.shape or getattr(module, "groups", 1) != mask.layout.groups:
            raise MaskError(
                f"the masks are for another model: layer {name} has a weight of shape {tuple(weight.shape)} in "
                f"{getattr(module, 'groups', 1)} group(s), its mask is for {mask.layout.shape} in {mask.layout.groups}"
            )
        weights[name] = weight
    return weights


def updates_of(weights: dict[str, Tensor], masks: MaskSet) -> dict[str, float]:
    """The estimated relative update of each layer whose weight is not the one its mask was made for.

    A weight that already has the mask applied counts as unchanged.
    """
    updates = {}
    for name, mask in masks.items():
        if mask.fingerprint is not None and not is_unchanged(weights[name], mask):
            updates[name] = mask.fingerprint.update(weights[name])
    return updates


def is_unchanged(weight: Tensor, mask: Mask) -> bool:
    """Whether the weight is bit for bit the one the mask was made for, before or after masking."""
    return mask.fingerprint is not None and digest(weight) in (mask.fingerprint.dense, mask.fingerprint.masked)


def _changed_message(updates: dict[str, float]) -> str:
    largest = sorted(updates, key=lambda name: -updates[name])
    sizes = listed([f"{name} by about {100 * updates[name]:.2g} %" for name in largest])
    return f"the weights of {len(updates)} masked layer(s) changed since the masks were made: {sizes}"


def _copy_statistics_(copy: nn.Module, statistics: dict[str, Tensor]) -> None:
    buffers = dict(copy.named_buffers(remove_duplicate=False))
    for name, value in statistics.items():
        if name not in buffers or buffers[name].shape != value.shape:
            raise MaskError(
                f"the masks are for another model: it has no BatchNorm buffer {name} of shape {tuple(value.shape)}"
            )
        with torch.no_grad():
            buffers[name].copy_(value)
