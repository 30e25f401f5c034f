"""Put a MaskSet on a copy of a model."""

import difflib
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from halve.errors import ChangedWeightsWarning, MaskError, listed
from halve.masks.fingerprint import digest
from halve.masks.layout import plain
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import move_
from halve.modules import clone, kind_of, set_weight_, weight_of

OnChanged = Literal["warn", "error", "ignore"]


def apply(model: nn.Module, masks: MaskSet, *, permute: bool = False, on_changed: OnChanged = "warn") -> nn.Module:
    """A copy of the model with zeros where the masks keep nothing; the model itself stays as it is.

    The copy is a plain module: same class, same state-dict names. Recalibrated BatchNorm statistics in `masks` are put
    on it. A masked layer under weight_norm or spectral_norm gets a plain weight in the copy, since a norm would move
    the zeros' neighbours.

    Masks that were found with channels in another order (`permute=True` of `prune` and `learn`) go on in the original
    order all the same. `permute=True` moves the channels of the copy: every block then lies in one piece, as kernels
    and exported models need it, the outputs stay as they are within float noise, and the weights are no longer in the
    checkpoint's order.

    `on_changed` says what happens on weights that the masks were not made for: "warn" (and say how large the update is
    for each layer), "error", or "ignore".

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> sparse = halve.apply(model, halve.prune(model))
    >>> int((sparse[0].weight == 0).sum()), int((model[0].weight == 0).sum())
    (32, 0)
    """
    if on_changed not in ("warn", "error", "ignore"):
        raise MaskError(f"on_changed={on_changed!r}: it must be 'warn', 'error' or 'ignore'")
    weights = check_fit(model, masks)
    if on_changed != "ignore" and (updates := updates_of(weights, masks)):
        message = _changed_message(updates)
        if on_changed == "error":
            raise MaskError(f"{message}; on_changed='warn' applies the masks all the same")
        warnings.warn(message, ChangedWeightsWarning, stacklevel=2)
    copy = clone(model)
    for name, mask in masks.items():
        set_weight_(copy.get_submodule(name), mask.put_on(weights[name]))
    _put_statistics_(copy, masks.statistics)
    if permute:
        move_(copy, masks.moves)
        _check_in_one_piece(copy, masks)
    return copy


def _check_in_one_piece(copy: nn.Module, masks: MaskSet) -> None:
    for name, mask in masks.items():
        blocks = plain(mask.layout).to_blocks(weight_of(copy.get_submodule(name)) != 0)
        if int(blocks.sum(-1).max()) > mask.pattern.kept:
            raise MaskError(
                f"layer {name} has a channel order that the masks' moves do not make; masks from "
                f"prune(permute=True) or learn(permute=True) have both"
            )


def check_fit(model: nn.Module, masks: MaskSet) -> dict[str, Tensor]:
    """The weights that the masks belong to, by layer name; raises where a mask has no layer it fits."""
    if not isinstance(masks, MaskSet):
        raise MaskError(
            f"masks must be a MaskSet, from halve.learn, halve.prune or halve.load; got {type(masks).__name__}"
        )
    modules = dict(model.named_modules())
    if missing := [name for name in masks if name not in modules]:
        near = difflib.get_close_matches(missing[0], modules, n=3)
        raise MaskError(
            f"the masks are for another model: {type(model).__name__} has no layer {listed(missing)}"
            + (f" (near {missing[0]}: {', '.join(near)})" if near else "")
        )
    weights = {}
    for name, mask in masks.items():
        module = modules[name]
        if kind_of(module) != mask.layout.kind:
            raise MaskError(f"layer {name} is a {type(module).__name__}, the mask is for a {mask.layout.kind} layer")
        weight = weight_of(module)
        if tuple(weight.shape) != mask.layout.shape or getattr(module, "groups", 1) != mask.layout.groups:
            raise MaskError(
                f"layer {name} has weights {tuple(weight.shape)} in {getattr(module, 'groups', 1)} group(s), "
                f"the mask is for {mask.layout.shape} in {mask.layout.groups}: it belongs to another model"
            )
        weights[name] = weight
    return weights


def updates_of(weights: dict[str, Tensor], masks: MaskSet) -> dict[str, float]:
    """For each layer whose weight is not the one the mask was made for: about how large the update is, relatively.

    A weight that already has the mask on counts as unchanged.
    """
    updates = {}
    for name, mask in masks.items():
        if mask.fingerprint is not None and not is_unchanged(weights[name], mask):
            updates[name] = mask.fingerprint.update(weights[name])
    return updates


def is_unchanged(weight: Tensor, mask: Mask) -> bool:
    """Whether the weight is the one that the mask was made for, to the bit, with or without the mask on it."""
    return mask.fingerprint is not None and digest(weight) in (mask.fingerprint.dense, mask.fingerprint.masked)


def _changed_message(updates: dict[str, float]) -> str:
    largest = sorted(updates, key=lambda name: -updates[name])
    sizes = listed([f"{name} by about {100 * updates[name]:.2g} %" for name in largest])
    return f"the weights of {len(updates)} masked layer(s) changed since the masks were made: {sizes}"


def _put_statistics_(copy: nn.Module, statistics: dict[str, Tensor]) -> None:
    buffers = dict(copy.named_buffers(remove_duplicate=False))
    for name, value in statistics.items():
        if name not in buffers or buffers[name].shape != value.shape:
            raise MaskError(
                f"the masks carry BatchNorm statistics {name} of shape {tuple(value.shape)}, not in the model"
            )
        with torch.no_grad():
            buffers[name].copy_(value)
