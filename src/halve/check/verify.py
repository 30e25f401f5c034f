"""Verify that a model is what `apply` returns: N:M in place, and nothing else changed since the masks were made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from halve.check.hardware import eligibility
from halve.check.unchecked import unchecked_in
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
from halve.text import aligned, printable

OnChanged = Literal["fail", "accept"]
Status = Literal["ok", "changed", "not applied", "unknown", "failed"]
WeightState = Literal["masked", "dense", "changed", "unknown", "not compared"]
TensorState = Literal["unchanged", "recalibrated", "corrected", "changed", "missing", "added", "unknown"]
Problem = Literal["changed", "not applied", "broken"]

COLUMNS = ("layer", "pattern", "in place", "weight", "hardware that can use it")
_NOT_FINITE = "contains NaN or infinity"
_NEXT: dict[Status, str] = {
    "ok": "halve.compile(model, masks, images)",
    "changed": "halve.verify(model, masks, on_changed='accept') if the update is intended",
    "not applied": "halve.apply(model, masks)",
    "unknown": "halve.learn or halve.prune, whose masks say which model they were made for",
    "failed": "halve.apply(model, masks) with the checkpoint that the masks were made for",
}


@dataclass(frozen=True)
class LayerCheck:
    """The outcome for one layer.

    Args:
        name: The layer.
        pattern: Its N:M pattern.
        in_place: Whether each block of its weight, as it stands, has at most N weights that are not zero.
        applied: Whether at least half of the weights that the mask drops are zero; None if they are in the checkpoint.
        state: The weight that the mask was made for, with the mask applied ("masked") or without ("dense"), or another
            one ("changed"); "unknown" if the masks have no digests, "not compared" without masks.
        cast: The narrower dtype that the weight was cast to. Its bits are those of the cast.
        update: An estimate of the relative size of the change, if changed.
        not_tensorrt: Why TensorRT cannot accelerate the layer as it stands; None if it can.
        not_tensor_cores: The same for sparse tensor cores.
        problem: The kind of failure, if any: "changed" can be accepted, "not applied" and "broken" cannot.
        failure: What is wrong.
    """

    name: str
    pattern: Pattern
    in_place: bool
    applied: bool | None
    state: WeightState
    cast: torch.dtype | None
    update: float | None
    not_tensorrt: str | None
    not_tensor_cores: str | None
    problem: Problem | None
    failure: str | None

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        weight = self.state if self.update is None else f"changed by about {percent(self.update)}"
        cast = "" if self.cast is None else f", cast to {_short(self.cast)}"
        return (self.name, str(self.pattern), "yes" if self.in_place else "no", weight + cast, self._hardware())

    def _hardware(self) -> str:
        if self.not_tensorrt is not None:
            return f"none: {self.not_tensorrt}"
        if self.not_tensor_cores is not None:
            return f"TensorRT; not sparse tensor cores: {self.not_tensor_cores}"
        return "TensorRT, sparse tensor cores"


@dataclass(frozen=True)
class TensorCheck:
    """The outcome for a parameter or buffer other than a masked weight.

    Args:
        name: Its state-dict name.
        state: How it compares with the model that the masks were made for. "recalibrated" is a buffer as the masks hold
            it, "corrected" the scale or shift of a norm as the masks correct it; "unknown" cannot be compared.
        cast: The narrower dtype that it was cast to. Its bits are those of the cast.
        problem: The kind of failure, if any: "changed" can be accepted, "broken" cannot.
        failure: What is wrong.
    """

    name: str
    state: TensorState
    cast: torch.dtype | None = None
    problem: Problem | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`. Prints as a table.

    Args:
        layers: One entry per masked layer.
        tensors: One entry for each other parameter and buffer, except tied ones and BatchNorm's counters of batches.
        unchecked: Code that may change what the model computes, such as hooks, by module name. It is not checked.
        moved: Whether the channels are in the order that `apply` moves them to.
        recorded: Whether the masks have digests of the model that they were made for.
    """

    layers: tuple[LayerCheck, ...]
    tensors: tuple[TensorCheck, ...] = ()
    unchecked: Mapping[str, str] = field(default_factory=dict)
    moved: bool = False
    recorded: bool = True

    @property
    def ok(self) -> bool:
        """Whether every layer is N:M in place, and all tensors are unchanged, or their change was accepted."""
        return self.status == "ok"

    @property
    def status(self) -> Status:
        """The outcome in a word.

        - "ok": see `ok`.
        - "changed": tensors differ from the model that the masks were made for, which on_changed="accept" accepts.
        - "not applied": a dense model that fits its masks. `apply` applies them.
        - "unknown": the masks have no digests, or a tensor has none since it is sparse or quantized.
        - "failed": anything else. Also if no layer was checked.
        """
        problems = {check.problem for check in self._checks}
        applied = {layer.applied for layer in self.layers if layer.applied is not None}
        if not self.layers or "broken" in problems or len(applied) > 1:
            return "failed"
        if "changed" in problems:
            return "changed"
        if applied == {False}:
            return "not applied"
        return "ok" if self.recorded and not self._unknown else "unknown"

    @property
    def failures(self) -> dict[str, str]:
        """What is wrong, by the name of the layer or tensor."""
        return {check.name: check.failure for check in self._checks if check.failure is not None}

    @property
    def accepted(self) -> dict[str, float | None]:
        """Changed layers and tensors that were accepted, with the estimated size of the change of masked weights."""
        changed = [check for check in self._checks if check.state == "changed" and check.problem != "changed"]
        return {check.name: getattr(check, "update", None) for check in changed if check.problem != "broken"}

    @property
    def casts(self) -> dict[str, str]:
        """The narrower dtype that layers and tensors were cast to, by name."""
        return {check.name: _short(check.cast) for check in self._checks if check.cast is not None}

    @property
    def accelerated(self) -> tuple[str, ...]:
        """Layers that sparse tensor cores can accelerate as they stand."""
        return tuple(layer.name for layer in self.layers if layer.not_tensor_cores is None)

    @property
    def not_accelerated(self) -> dict[str, str]:
        """Layers that sparse tensor cores cannot accelerate as they stand, and why. They may be ok nevertheless."""
        return {layer.name: layer.not_tensor_cores for layer in self.layers if layer.not_tensor_cores is not None}

    @property
    def notes(self) -> list[str]:
        """What to know besides the table and the failures, one line each."""
        lines = []
        if self.tensors:
            counts = {state: sum(tensor.state == state for tensor in self.tensors) for state in get_args(TensorState)}
            lines.append("other tensors: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n))
        if self.moved:
            lines.append("channels: moved by apply")
        for dtype in dict.fromkeys(self.casts.values()):
            names = [name for name, cast in self.casts.items() if cast == dtype]
            lines.append(f"cast to {dtype}, bit for bit: {listed(names, 4)}")
        if self.accepted:
            lines.append(f"accepted: {self._update()}")
        return lines + [f"unchecked: {name}: {reason}" for name, reason in self.unchecked.items()]

    @property
    def summary(self) -> str:
        """The outcome in a line."""
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        if not self.layers:
            return "no layer was checked"
        if self.status == "not applied":
            return f"the masks of {count} fit the model, but are not applied to it"
        if self.status == "unknown" and self.recorded:
            return f"tensors that cannot be compared: {listed(self._unknown)}"
        if self.status == "unknown":
            return "the masks do not say which model they were made for, so its tensors cannot be compared"
        if self.status != "ok":
            return f"{len(self.failures)} of {len(self._checks)} checks failed"
        if not self._compared:
            return f"{count} N:M in place"
        words = ["unchanged", *(["cast"] if self.casts else []), *(["accepted"] if self.accepted else [])]
        return f"{count} N:M in place, all tensors {' or '.join(words)}"

    @property
    def has_next(self) -> bool:
        """Whether there is something to do next."""
        return bool(self.layers) and self._compared and not (self.status == "unknown" and self.recorded)

    @property
    def _compared(self) -> bool:
        """Whether there were masks to compare the model with."""
        return not any(layer.state == "not compared" for layer in self.layers)

    @property
    def _unknown(self) -> list[str]:
        return [check.name for check in self._checks if check.state == "unknown"]

    @property
    def _checks(self) -> tuple[LayerCheck | TensorCheck, ...]:
        return (*self.layers, *self.tensors)

    def _update(self) -> str:
        """The size of the update that was accepted."""
        sizes = {name: size for name, size in self.accepted.items() if size is not None}
        others = [name for name in self.accepted if name not in sizes]
        parts = []
        if sizes:
            largest = max(sizes, key=lambda name: sizes[name])
            parts.append(f"{len(sizes)} masked weight(s) changed, by up to about {percent(sizes[largest])} ({largest})")
        if others:
            parts.append(f"{len(others)} other tensor(s) changed ({listed(others, 4)})")
        return "; ".join(parts)

    def __str__(self) -> str:
        rows = [COLUMNS, *(layer.cells() for layer in self.layers)]
        lines = aligned(rows)
        lines += self.notes
        if self.status != "not applied":  # the table shows it
            lines += [f"failure: {name}: {failure}" for name, failure in self.failures.items()]
        lines.append(f"{self.status}: {self.summary}")
        if self.has_next:
            lines.append(f"next: {_NEXT[self.status]}")
        return printable("\n".join(lines))


def percent(share: float) -> str:
    """Format the size of a change.

    >>> percent(0.012345), percent(1.2345), percent(float("nan"))
    ('1.2 %', '123 %', 'an unknown share')
    """
    if math.isnan(share):
        return "an unknown share"
    return f"{100 * share:.0f} %" if share > 0.99 else f"{100 * share:.2g} %"


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
    for name, weight in check_fit(model, masks).items():
        _check_dense(name, weight)
    check_statistics(model, masks.statistics)
    check_corrections(model, masks.corrections)
    moved = is_moved(model, masks)
    compare = _Comparison(model, masks, moved, on_changed == "accept")
    layers = tuple(compare.layer(name, weight.cpu()) for name, weight in check_fit(model, masks).items())
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
            *(name, mask.pattern, not crowded, applied, state, cast, update),
            *(able.tensorrt, able.tensor_cores, problem, failure),
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
        *(name, pattern, not crowded, None, "not compared", None, None),
        *(able.tensorrt, able.tensor_cores, None if failure is None else "broken", failure),
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
