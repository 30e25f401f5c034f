"""Verify that a model is what `apply` returns: N:M in place, and nothing else changed since the masks were made."""

from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from halve.check.hardware import eligibility
from halve.check.unchecked import unchecked_in
from halve.check.verification import (
    LayerCheck,
    Problem,
    TensorCheck,
    TensorState,
    Verification,
    WeightState,
    percent,
)
from halve.errors import ModelError, OptionError, listed
from halve.masks.apply import check_fit, check_statistics, is_moved
from halve.masks.corrections import check_corrections
from halve.masks.digests import Digests, TensorDigests, digests_of, has_digest, matching_dtype, named_tensors
from halve.masks.fingerprint import digest
from halve.masks.layout import Layout, unpermuted
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import fits, moved_back
from halve.masks.pattern import Pattern
from halve.modules import check_initialised, unwrapped, weight_name, weight_of, weight_sources
from halve.select.select import SelectOptions, select

OnChanged = Literal["fail", "accept"]
_NOT_FINITE = "contains NaN or infinity"


def verify(
    model: nn.Module,
    masks: MaskSet | None = None,
    *,
    on_changed: OnChanged = "fail",
    **selection: Unpack[SelectOptions],
) -> Verification:
    """Verify that a model is what `apply` returns: its masks applied, and nothing else changed.

    The tensors are judged as they stand. `.ok` means that every masked layer is N:M in place, that the kept weights are
    bit for bit those that the masks were made for, and that all other parameters and buffers are unchanged. Channels
    that `apply` moved, BatchNorm statistics that the masks hold and norms that they correct count as unchanged. So does
    a cast, since it can be compared bit for bit; `.casts` lists it. BatchNorm's counters of batches are ignored. Only
    tensors are compared: `.unchecked` lists hooks, parametrizations and other code; classes, strides and the like are
    not checked.

    Raises `MaskError` if the masks are for another architecture.

    Args:
        model: The masked model. It is not changed.
        masks: Its masks. None checks only that the weights are N:M in place.
        on_changed: Whether changed tensors "fail" (default), or are an intended update to "accept": `.accepted` then
            says how large it is. N:M must hold in either case.
        **selection: Without masks, the options of `select` that say which layers to check.

    Returns:
        An object with `.ok`, `.status`, `.failures` by name, and one entry per layer and tensor. It prints as a table.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> masks = halve.prune(model)
    >>> print(halve.verify(halve.apply(model, masks), masks))
    layer | pattern | in place | weight | hardware that can use it
    0     | 2:4     | yes      | masked | TensorRT, sparse tensor cores
    other tensors: 3 unchanged
    ok: 1 layer N:M in place, all tensors unchanged
    next: halve.compile(model, masks, images)
    >>> halve.verify(model, masks).status
    'not applied'
    """
    if on_changed not in get_args(OnChanged):
        raise OptionError(f"on_changed must be one of {listed(get_args(OnChanged))}, got {on_changed!r}")
    model = unwrapped(model)
    check_initialised(model)
    if masks is None:
        if on_changed != "fail":
            raise OptionError("on_changed='accept' needs masks: without them, nothing is compared")
        checks = [
            _check_alone(c.name, c.pattern, c.layout, weight_of(model.get_submodule(c.name)))
            for c in select(model, **selection).masked
            if c.pattern is not None and c.layout is not None
        ]
        return Verification(tuple(checks), unchecked=unchecked_in(model, [check.name for check in checks]))
    if selection:
        raise OptionError(f"verify accepts masks or options of select, not both; got masks and {listed(selection)}")
    weights = check_fit(model, masks)
    for name, weight in weights.items():
        _check_dense(name, weight)
    check_statistics(model, masks.statistics)
    check_corrections(model, masks.corrections)
    moved = is_moved(model, masks)
    compare = _Comparison(model, masks, moved, on_changed == "accept")
    layers = tuple(compare.layer(name, weight.cpu()) for name, weight in weights.items())
    applied = {layer.applied for layer in layers} != {False}
    others, recorded = compare.others(applied), masks.digests is not None
    return Verification(layers, others, unchecked_in(model, masks), moved, recorded)


class _Comparison:
    """Compares a model with what its masks say about the model that they were made for."""

    def __init__(self, model: nn.Module, masks: MaskSet, moved: bool, accept: bool) -> None:
        self._masks, self._digests, self._accept = masks, masks.digests, accept
        self._given = named_tensors(model, {*masks, *self._computed(model)})
        self._moves = masks.moves if moved else {}
        self._held: dict[str, tuple[TensorState, Tensor]] = {
            **{name: ("recalibrated", value) for name, value in masks.statistics.items()},
            **{name: ("corrected", pair[1]) for name, pair in masks.corrections.items()},
        }

    def _computed(self, model: nn.Module) -> list[str]:
        """Layers whose weight the model computes and the masks know as plain: with a mask once, or without a norm."""
        known = {} if self._digests is None else self._digests.dense
        return [name for name, module in model.named_modules() if weight_name(name) in known and weight_sources(module)]

    def layer(self, name: str, weight: Tensor) -> LayerCheck:
        """Check the weight of a masked layer."""
        mask, original = self._masks[name], self._moved_back(weight_name(name), weight)
        dropped = ~mask.kept()
        filled, drops = int((dropped & (original != 0)).sum()), int(dropped.sum())
        # Dropped weights may also be -0.0, which other tools leave.
        state, cast = self._state(name, mask, original if filled else original.masked_fill(dropped, 0), bool(filled))
        applied = None if self._drops_zeros(name) else state != "dense" and 2 * filled <= drops
        update = mask.fingerprint.update(original) if state == "changed" and mask.fingerprint is not None else None
        size = "" if update is None else f" by about {percent(update)}"
        layout = unpermuted(mask.layout)
        crowded = illegal_blocks(mask.pattern, layout, weight != 0)
        problem: Problem | None = "broken"
        failure: str | None = None
        if not bool(weight.isfinite().all()):
            failure = f"its weight {_NOT_FINITE}"
        elif filled and applied is not False:
            failure = f"{filled:,} of the {drops:,} weights that its mask drops are not zero"
        elif filled and state == "changed" and not self._accept:
            problem, failure = "changed", f"its mask is not applied, and its weight changed{size}"
        elif filled:
            problem, failure = "not applied", "its mask is not applied"
        elif crowded:
            share = percent(crowded / (layout.rows * layout.blocks))
            failure = f"not {mask.pattern} in place: {share} of its blocks keep more; its channels were not moved"
        elif state == "changed" and not self._accept:
            problem, failure = "changed", f"its weight changed{size} since the mask was made"
        else:
            problem = None
        able = eligibility(mask.layout.kind, mask.layout.groups, weight != 0)
        return LayerCheck(
            name=name,
            pattern=mask.pattern,
            in_place=not crowded,
            applied=applied,
            state=state,
            cast=cast,
            update=update,
            not_tensorrt=able.tensorrt,
            not_tensor_cores=able.tensor_cores,
            problem=problem,
            failure=failure,
        )

    def _state(self, name: str, mask: Mask, weight: Tensor, filled: bool) -> tuple[WeightState, torch.dtype | None]:
        """How a weight in the checkpoint's order compares with the one the mask was made for, and its cast."""
        known: TensorDigests
        if self._digests is not None:
            known = self._dense(weight_name(name)) if filled else self._digests.masked[name]
        elif mask.fingerprint is not None:
            known = {weight.dtype: mask.fingerprint.dense if filled else mask.fingerprint.masked}
        else:
            return "unknown", None
        dtype = matching_dtype(weight, known)
        return ("changed", None) if dtype is None else ("dense" if filled else "masked", _cast(dtype, known))

    def _drops_zeros(self, name: str) -> bool:
        """Whether all weights that a mask drops are zero in the checkpoint, as far as is known."""
        if self._digests is not None:
            return self._dense(weight_name(name)) == self._digests.masked[name]
        fingerprint = self._masks[name].fingerprint
        return fingerprint is not None and fingerprint.dense == fingerprint.masked

    def others(self, applied: bool) -> tuple[TensorCheck, ...]:
        """Check all tensors but the masked weights. `applied` says whether masks are applied to the model."""
        weights = set(map(weight_name, self._masks))
        if self._digests is None:
            return tuple(TensorCheck(name, "unknown") for name in self._given if name not in weights)
        names = {**self._digests.dense, **self._digests.tied, **self._given}
        return tuple(
            self._tensor(name, self._digests, applied)
            for name in names
            if name not in weights and not self._is_tied(name, self._digests)
        )

    def _is_tied(self, name: str, digests: Digests) -> bool:
        """Whether a tensor still equals the one that it was tied to, so that it is checked under that name."""
        one, other = self._given.get(name), self._given.get(digests.tied.get(name, ""))
        if one is None or other is None or not has_digest(one) or not has_digest(other):
            return False
        return digest(one) == digest(other)

    def _tensor(self, name: str, digests: Digests, applied: bool) -> TensorCheck:
        """Check a tensor that is not a masked weight."""
        tensor, known = self._given.get(name), digests.dense.get(name)
        if tensor is None:
            return TensorCheck(name, "missing", None, "broken", "the model does not have it")
        if name in digests.tied:
            failure = f"it does not equal {digests.tied[name]}, which it was tied to"
            return TensorCheck(name, "changed", None, "broken", failure)
        if known is None and has_digest(tensor):
            return TensorCheck(name, "added", None, "broken", "the model that the masks were made for does not have it")
        if known is None:
            return TensorCheck(name, "unknown")
        if not has_digest(tensor):
            return TensorCheck(name, "changed", None, "broken", f"it is a {_kind_of(tensor)}, which it was not")
        return self._compared(name, self._moved_back(name, tensor), known, applied)

    def _compared(self, name: str, tensor: Tensor, known: TensorDigests, applied: bool) -> TensorCheck:
        """Compare a tensor in the checkpoint's order with its digests, or with what the masks hold in its place."""
        state: TensorState = "unchanged"
        dtype, failure = matching_dtype(tensor, known), "it changed since the masks were made"
        if applied and name in self._held:
            state, held = self._held[name]
            if dtype is not None:
                failure = f"it is the checkpoint's, not the {state} one that the masks hold"
            known = digests_of(held.to(next(iter(known))))
            dtype = matching_dtype(tensor, known)
        cast = None if dtype is None else _cast(dtype, known)
        if (dtype is None or cast is not None) and not bool(tensor.isfinite().all()):
            return TensorCheck(name, "changed", cast, "broken", f"it {_NOT_FINITE}")
        if dtype is None:
            return TensorCheck(name, "changed", *((None, None, None) if self._accept else (None, "changed", failure)))
        return TensorCheck(name, state, cast)

    def _dense(self, name: str) -> TensorDigests:
        """The digests of a tensor of the model that the masks were made for."""
        assert self._digests is not None
        return self._digests.dense[self._digests.first_name(name)]

    def _moved_back(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the given model in the checkpoint's channel order."""
        dims = self._moves.get(name, {})
        return moved_back(tensor, dims) if dims and fits(tensor, dims) else tensor


def _check_alone(name: str, pattern: Pattern, layout: Layout, weight: Tensor) -> LayerCheck:
    """Check that a weight is N:M in place, without masks to compare it with."""
    _check_dense(name, weight)
    nonzero = weight.cpu() != 0
    crowded = illegal_blocks(pattern, layout, nonzero)
    failure = None
    if crowded:
        failure = f"{percent(crowded / (layout.rows * layout.blocks))} of its blocks keep more than {pattern}"
    elif not bool(weight.isfinite().all()):
        failure = f"its weight {_NOT_FINITE}"
    able = eligibility(layout.kind, layout.groups, nonzero)
    return LayerCheck(
        name=name,
        pattern=pattern,
        in_place=not crowded,
        not_tensorrt=able.tensorrt,
        not_tensor_cores=able.tensor_cores,
        problem=None if failure is None else "broken",
        failure=failure,
    )


def _check_dense(name: str, weight: Tensor) -> None:
    if not has_digest(weight):
        kind = _kind_of(weight)
        raise ModelError(f"the weight of layer {name} cannot be verified: it must be dense and have data, got a {kind}")


def _kind_of(tensor: Tensor) -> str:
    return f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device.type})"


def illegal_blocks(pattern: Pattern, layout: Layout, nonzero: Tensor) -> int:
    """The number of blocks that keep more than N."""
    return int((layout.to_blocks(nonzero.float()).sum(-1) > pattern.kept).sum())


def _cast(dtype: torch.dtype, known: TensorDigests) -> torch.dtype | None:
    """The dtype that a tensor was cast to, given the one its values match."""
    return None if dtype == next(iter(known)) else dtype
