"""Apply a MaskSet to a copy of a model."""

import difflib
from typing import Literal

import torch
from torch import Tensor, nn

from halve.errors import ChangedWeightsWarning, ChannelOrderWarning, MaskError, OptionError, listed, warn
from halve.masks.corrections import correct_
from halve.masks.digests import matching_dtype, named_tensors
from halve.masks.fingerprint import digest
from halve.masks.layout import unpermuted
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import fits, inverse_of, move_, moved_back
from halve.modules import clone, kind_of, set_weight_, unwrapped, weight_name, weight_of

OnChanged = Literal["warn", "error", "ignore"]


def apply(model: nn.Module, masks: MaskSet, *, permute: bool = True, on_changed: OnChanged = "warn") -> nn.Module:
    """Return a copy of the model with zeros where the masks keep nothing, N:M in place along its input channels.

    The copy is a plain module of the same class with the same state-dict names and shapes, and computes what the masked
    network computes. Masks that were found in better channel orders (as `learn` does by default) are applied in these
    orders: the channels of the copy are moved, since hardware and exporters only see N:M in contiguous blocks.
    `restore_order` moves them back. Recalibrated BatchNorm statistics in `masks` are copied into it, and corrections of
    norms are put on. A masked layer under weight_norm or spectral_norm gets a plain weight, since renormalising would
    change the kept weights.

    Args:
        model: The dense model. It is not changed. A model that the masks were already applied to is recognised.
        masks: Its masks.
        permute: Move the channels so that every block is contiguous. False keeps the checkpoint's channel order, which
            no hardware can use if the masks have channel orders, with a warning. Default: True.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default) about how much
            each layer changed, "error" or "ignore".

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> sparse = halve.apply(model, halve.prune(model))
    >>> int((sparse[0].weight == 0).sum()), int((model[0].weight == 0).sum())
    (32, 0)
    """
    copy = applied_in_checkpoint_order(model, masks, on_changed)
    if permute:
        move_(copy, masks.moves)
        _check_contiguous(copy, masks)
    elif scattered := [name for name, mask in masks.items() if mask.layout.channel_order is not None]:
        warn(
            f"permute=False keeps the checkpoint's channel order: {len(scattered)} of {len(masks)} masked layers are "
            f"not N:M in place, and no hardware can use them",
            ChannelOrderWarning,
        )
    return copy


def applied_in_checkpoint_order(model: nn.Module, masks: MaskSet, on_changed: OnChanged) -> nn.Module:
    """The masked copy with its channels in the order of the checkpoint that the masks were made for."""
    if on_changed not in ("warn", "error", "ignore"):
        raise OptionError(f"on_changed must be 'warn', 'error' or 'ignore', got {on_changed!r}")
    copy = restore_order(model, masks)
    weights = check_fit(copy, masks)
    if on_changed != "ignore" and (updates := updates_of(weights, masks)):
        message = _changed_message(updates)
        if on_changed == "error":
            raise MaskError(f"{message}; on_changed='warn' applies the masks anyway")
        warn(message, ChangedWeightsWarning)
    applied = all(_is_applied(weights[name], mask) for name, mask in masks.items())
    for name, mask in masks.items():
        set_weight_(copy.get_submodule(name), mask.apply_to(weights[name]))
    _copy_statistics_(copy, masks.statistics)
    correct_(copy, masks.corrections, applied=applied)
    return copy


def restore_order(model: nn.Module, masks: MaskSet) -> nn.Module:
    """Return a copy of the model with its channels in the checkpoint's order: undoes what `apply` moved.

    A model whose channels were not moved is copied as it is.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> masks = halve.prune(model, permute=True, example=torch.randn(2, 16))
    >>> sparse = halve.apply(model, masks)
    >>> torch.equal(halve.restore_order(sparse, masks)[4].weight, model[4].weight)
    True
    """
    model = unwrapped(model)
    moved = is_moved(model, masks)
    copy = clone(model)
    if moved:
        move_(copy, inverse_of(masks.moves))
    return copy


def is_moved(model: nn.Module, masks: MaskSet) -> bool:
    """Whether `apply` moved the channels of a model. Raises if a mask does not fit its layer.

    Moved back, a masked weight has its zeros where the mask drops weights. A dense one is closer to the weight that the
    mask was made for, as its fingerprint tells. If the masked layers have no moves, the digests of other tensors tell.
    """
    moves = masks.moves
    pairs = [
        (masks[name], weight, moved_back(weight, dims))
        for name, weight in check_fit(model, masks).items()
        if (dims := moves.get(weight_name(name))) and fits(weight, dims)
    ]
    unmoved = sum(_is_applied(weight, mask) for mask, weight, _ in pairs)
    moved = sum(_is_applied(back, mask) for mask, _, back in pairs)
    if unmoved != moved:
        return moved > unmoved
    distance = sum(_distance(weight, mask) for mask, weight, _ in pairs)
    distance_back = sum(_distance(back, mask) for mask, _, back in pairs)
    if distance or distance_back:
        return distance_back < 0.5 * distance  # about equal for unrelated weights, such as another training run
    known = masks.digests.dense if masks.digests is not None else {}
    others = [
        (known[name], tensor, moved_back(tensor, moves[name]))
        for name, tensor in named_tensors(model, masks).items()
        if name in moves and name in known and fits(tensor, moves[name])
    ]
    unmoved = sum(matching_dtype(tensor, digests) is not None for digests, tensor, _ in others)
    moved = sum(matching_dtype(back, digests) is not None for digests, _, back in others)
    return moved > unmoved


def _is_applied(weight: Tensor, mask: Mask) -> bool:
    """Whether all weights that the mask drops are zero."""
    return not bool(weight[~mask.kept().to(weight.device)].any())


def _distance(weight: Tensor, mask: Mask) -> float:
    """The estimated relative difference to the weight that the mask was made for; 0 if unknown."""
    return 0.0 if mask.fingerprint is None or is_unchanged(weight, mask) else mask.fingerprint.update(weight)


def check_dense(model: nn.Module, masks: MaskSet) -> None:
    """Raise `MaskError` if the masks are already applied to the model where the dense model is needed."""
    moves = masks.moves
    changing: list[tuple[str, Mask, Tensor, Tensor]] = []
    for name, weight in check_fit(model, masks).items():
        print_, dims = masks[name].fingerprint, moves.get(weight_name(name), {})
        if print_ is None or print_.dense == print_.masked:
            continue
        back = moved_back(weight, dims) if dims and fits(weight, dims) else weight
        if print_.masked in (digest(weight), digest(back)):
            raise MaskError(f"the masks are already applied to the model (layer {name}): pass the dense model")
        changing.append((name, masks[name], weight, back))
    if changing and all(_is_applied(w, mask) or _is_applied(back, mask) for _, mask, w, back in changing):
        # the weights are others, such as after fine-tuning, but all zeros are where the masks drop weights
        raise MaskError(f"the masks are already applied to the model (layer {changing[0][0]}): pass the dense model")


def _check_contiguous(copy: nn.Module, masks: MaskSet) -> None:
    """Raise if a block of the permuted copy keeps more than N weights."""
    for name, mask in masks.items():
        blocks = unpermuted(mask.layout).to_blocks(weight_of(copy.get_submodule(name)) != 0)
        if int(blocks.sum(-1).max()) > mask.pattern.kept:
            raise MaskError(
                f"layer {name} has a channel order, but the mask set does not say how to move the channels; use masks "
                f"as prune or learn returned them, or permute=False to apply these in the checkpoint's order"
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

    A weight that already has the mask applied counts as unchanged, and so does a cast of the whole weight.
    """
    known = masks.digests.dense if masks.digests is not None else {}
    updates = {}
    for name, mask in masks.items():
        if mask.fingerprint is None or is_unchanged(weights[name], mask):
            continue
        digests = known.get(weight_name(name))
        if digests is None or matching_dtype(weights[name], digests) is None:
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
    buffers = check_statistics(copy, statistics)
    with torch.no_grad():
        for name, value in statistics.items():
            buffers[name].copy_(value)


def check_statistics(model: nn.Module, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's buffers by name. Raises `MaskError` if statistics are not for running statistics of this model."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, value in statistics.items():
        known = name.rpartition(".")[2] in ("running_mean", "running_var") and name in buffers
        if not known or buffers[name].shape != value.shape:
            raise MaskError(
                f"the masks are for another model: it has no BatchNorm buffer {name} of shape {tuple(value.shape)}"
            )
        if not bool(value.isfinite().all()):
            raise MaskError(f"the masks' statistics {name} contain NaN or infinity: recalibrate again")
    return buffers
