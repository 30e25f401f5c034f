"""What `verify` found: of each layer, of each other tensor, and of the model as a whole."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from halve.errors import listed
from halve.masks.pattern import Pattern
from halve.text import aligned, printable

Status = Literal["ok", "changed", "not applied", "unknown", "failed"]
WeightState = Literal["masked", "dense", "changed", "unknown", "not compared"]
TensorState = Literal["unchanged", "recalibrated", "corrected", "changed", "missing", "added", "unknown"]
Problem = Literal["changed", "not applied", "broken"]

COLUMNS = ("layer", "pattern", "in place", "weight", "hardware that can use it")
_NEXT: dict[Status, str] = {
    "ok": "halve.compile(model, masks, images)",
    "changed": "halve.verify(model, masks, on_changed='accept') if the update is intended",
    "not applied": "halve.apply(model, masks)",
    "unknown": "halve.learn or halve.prune, whose masks say which model they were made for",
    "failed": "halve.apply(model, masks) with the checkpoint that the masks were made for",
}


@dataclass(frozen=True, kw_only=True)
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
    applied: bool | None = None
    state: WeightState = "not compared"
    cast: torch.dtype | None = None
    update: float | None = None
    not_tensorrt: str | None
    not_tensor_cores: str | None
    problem: Problem | None = None
    failure: str | None = None

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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
