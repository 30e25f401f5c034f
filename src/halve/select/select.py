"""Decide which layers are masked, with a reason for each layer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halve.batches import Forward
from halve.errors import ModelError, OptionError, SpeedWarning, listed, warn
from halve.machine import device_names
from halve.markup import table
from halve.masks.layout import ORDERS, Layout, Order
from halve.masks.pattern import Pattern
from halve.modules import (
    KINDS,
    Kind,
    check_initialised,
    has_weight,
    kind_of,
    unwrapped,
    weight_key,
    weight_of,
    zeros_stay_zero,
)
from halve.process_state import preserved_process_state
from halve.progress import is_first_rank
from halve.select.head import find_heads
from halve.select.ran import layers_that_run
from halve.select.speed_plan import SpeedPlan, load_plan, plan_of
from halve.text import aligned

Remainder = Literal["skip", "pad", "error"]
REMAINDERS: tuple[Remainder, ...] = ("skip", "pad", "error")
Globs = str | Sequence[str]
PatternRule = str | Pattern | Mapping[str, str | Pattern | None]
NOT_RUN = "did not run on the data"
NOT_INCLUDED = "not in include"


class SelectOptions(TypedDict, total=False):
    """The options of `select`, which `prune` and `learn` accept too."""

    pattern: PatternRule
    include: Globs | None
    exclude: Globs | None
    also: Globs | None
    order: Order
    remainder: Remainder
    kinds: Sequence[Kind] | None
    plan: SpeedPlan | str | Path | None
    target: str | None


@dataclass(frozen=True)
class Choice:
    """The decision on one layer: masked with `pattern` in `layout`, or dense (both None), and the reason.

    `is_head` says whether the reason is that it is an output head.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    pattern: Pattern | None
    layout: Layout | None
    reason: str
    shared_with: tuple[str, ...] = ()
    is_head: bool = False

    @property
    def masked(self) -> bool:
        return self.layout is not None


class Selection(Sequence[Choice]):
    """The decisions on all layers of a model. Prints as a table."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = tuple(choices)

    @overload
    def __getitem__(self, index: int) -> Choice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Choice]: ...
    def __getitem__(self, index: int | slice) -> Choice | Sequence[Choice]:
        return self._choices[index]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def masked(self) -> list[Choice]:
        """The decisions on the masked layers."""
        return [choice for choice in self if choice.masked]

    @property
    def not_masked(self) -> dict[str, str]:
        """Why the other layers are not masked, by name."""
        return {choice.name: choice.reason for choice in self if not choice.masked}

    def __repr__(self) -> str:
        return f"Selection({len(self.masked)} of {len(self)} layers masked)"

    def __str__(self) -> str:
        return "\n".join(aligned(self._rows(), "  "))

    def _repr_html_(self) -> str:
        return table(repr(self), ("layer", "type", ">shape", "pattern", "reason"), self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        return [(c.name, c.type, "x".join(map(str, c.shape)), str(c.pattern or "dense"), c.reason) for c in self]


@preserved_process_state()
def select(
    model: nn.Module,
    pattern: PatternRule = "2:4",
    *,
    include: Globs | None = None,
    exclude: Globs | None = None,
    also: Globs | None = None,
    order: Order = "channels",
    remainder: Remainder = "skip",
    kinds: Sequence[Kind] | None = None,
    plan: SpeedPlan | str | Path | None = None,
    target: str | None = None,
    data: Any = None,
    forward: Forward | None = None,
) -> Selection:
    """Decide for every layer whether it is masked.

    By default all convolutions and Linear layers are masked whose input channels are divisible by M, except grouped and
    depthwise convolutions and output heads (classifiers, box regressors). Layer names may be globs, such as "layer3.*".

    Args:
        model: The model. It is not changed. DataParallel, DistributedDataParallel and torch.compile are unwrapped.
        pattern: N:M pattern for all layers, or a dict from globs to patterns: the first match wins; None, or no match,
            keeps a layer dense. Default: "2:4".
        include: Mask only these layers (default: all).
        exclude: Keep these layers dense.
        also: Mask these layers too, although the default excludes them (heads, grouped convolutions, layers that do not
            run).
        order: "channels" for blocks along input channels (default), or "flat" as in the paper, which no hardware can
            accelerate.
        remainder: If the channels are not divisible by M, "skip" the layer (default), "pad" it with virtual zero
            columns, or raise an "error".
        kinds: Mask only these of "linear", "conv" and "conv_transpose" (default: all).
        plan: What `halve.measure` found, or the file it was saved to: layers where a mask does not pay stay dense,
            see `SpeedPlan.paying`. It must be of this machine, unless `target` names the one it is of.
        target: The device that the masks are for, such as "H200", if `plan` was measured on another machine.
        data: Batches of images. Layers that never run on them are not masked (default: all layers count as running).
        forward: `forward(model, batch)` runs the model on an unusual batch of `data`.

    Returns:
        One `Choice` per layer with pattern, layout and reason; `.masked` lists the masked ones.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    >>> print(select(model))
    0  Conv2d  8x3x3x3  dense  3 input channels, not divisible by 4 (remainder='pad' pads them)
    1  Conv2d  8x8x3x3  2:4    along input channels
    3  Linear  2x8      dense  output head (also='3' masks it)
    """
    model = unwrapped(model)
    rules = pattern if isinstance(pattern, Mapping) else {"*": pattern}
    patterns = {glob: None if rule is None else Pattern(rule) for glob, rule in rules.items()}
    if strange := [glob for glob in patterns if not isinstance(glob, str)]:
        raise OptionError(f"the keys of pattern must be names or globs of layers, got {listed(map(repr, strange))}")
    only, never, extra = _globs("include", include), _globs("exclude", exclude), _globs("also", also)
    wanted = _globs("kinds", kinds)
    if order not in ORDERS:
        raise OptionError(f"order must be one of {listed(ORDERS)}, got {order!r}")
    if remainder not in REMAINDERS:
        raise OptionError(f"remainder must be one of {listed(REMAINDERS)}, got {remainder!r}")
    if strange := sorted(set(wanted or ()) - set(KINDS)):
        raise OptionError(f"kinds must be among {listed(KINDS)}, got {listed(strange)}")
    layers = [(name, module) for name, module in model.named_modules() if _is_listed(name, module)]
    for glob in (*(only or ()), *(never or ()), *(extra or ()), *patterns):
        if glob != "*" and not any(fnmatchcase(name, glob) for name, _ in layers):
            raise OptionError(
                f"{glob!r} matches no layer of {type(model).__name__}; its layers are {listed(n for n, _ in layers)}"
            )
    heads = find_heads(model)
    owners = _owners(model)
    speeds = None if plan is None else _speeds(plan, target, layers, order)

    def decide(name: str, module: nn.Module) -> Choice:
        about = (name, type(module).__name__, _shape(module))
        dense = partial(Choice, *about, None, None)
        named = _match(name, extra)
        if reason := _unusable(name, module, owners):
            return dense(reason)
        if only is not None and not _match(name, only) and not named:
            return dense(NOT_INCLUDED)
        if wanted is not None and kind_of(module) not in wanted and not named:
            return dense(f"not in kinds ({listed(wanted)})")
        if never is not None and _match(name, never):
            return dense("in exclude")
        rule = next((rule for glob, rule in patterns.items() if fnmatchcase(name, glob)), None)
        if rule is None:
            return dense("no pattern matches it")
        groups = int(getattr(module, "groups", 1))
        names = owners[_key(module)]
        if not heads.isdisjoint((name, *names)) and not named:
            return dense(f"output head (also={name!r} masks it)", is_head=True)
        if groups > 1 and not named:
            word = "depthwise" if groups == module.in_channels else f"grouped ({groups} groups)"
            return dense(f"{word} convolution (also={name!r} masks within each group)")
        if speeds is not None and not named and (reason := _does_not_pay(speeds, name, rule)):
            return dense(f"{reason} (also={name!r} masks it)")
        layout, reason = _lay_out(name, module, rule, order, remainder)
        if layout is None:
            return dense(reason)
        return Choice(*about, rule, layout, reason, tuple(other for other in names if other != name))

    choices = [decide(name, module) for name, module in layers]
    if data is not None:
        choices = _running(model, choices, extra, data, forward)
    return Selection(choices)


def _speeds(
    plan: SpeedPlan | str | Path, target: str | None, layers: Sequence[tuple[str, nn.Module]], order: Order
) -> SpeedPlan:
    """The plan, checked to be of this network, and of this machine or the target."""
    found = plan_of(plan)
    if order != "channels":
        raise OptionError(f"plan= needs order='channels', got {order!r}: no hardware can use blocks in another order")
    found.check_target(device_names(), target)
    found.check_network({name: _shape(module) for name, module in layers})
    if found.faster and not found.pays and is_first_rank():  # if no layer is faster, nothing is masked
        warn(f"{found.device}, {found.dtype}, batch {found.batch}: {found.verdict}", SpeedWarning)
    return found


def _does_not_pay(speeds: SpeedPlan, name: str, rule: Pattern) -> str | None:
    if (rule.kept, rule.size) != (2, 4):
        return f"{rule} has no sparse kernel, only 2:4 has"
    return speeds.why_not(name)


def _running(
    model: nn.Module, choices: list[Choice], also: tuple[str, ...] | None, data: Any, forward: Forward | None
) -> list[Choice]:
    """The choices without masks for layers that do not run on the data, unless they are named."""
    doubtful = [c.name for c in choices if (c.masked or c.is_head) and not _match(c.name, also)]
    idle = set(doubtful) - layers_that_run(model, doubtful, data, forward)
    return [
        Choice(c.name, c.type, c.shape, None, None, f"{NOT_RUN} (also={c.name!r} masks it)") if c.name in idle else c
        for c in choices
    ]


def masked_weights(model: nn.Module, selection: Selection) -> dict[str, Tensor]:
    """The weights of the masked layers, by name. Raises if nothing is masked, or a weight is not finite."""
    if not selection.masked:
        reasons = listed([f"{choice.name}: {choice.reason}" for choice in selection], most=5)
        raise ModelError(f"{type(model).__name__} has no layer to mask; {reasons or 'it has no layers'}")
    check_initialised(model)
    weights = {choice.name: weight_of(model.get_submodule(choice.name)) for choice in selection.masked}
    for name, weight in weights.items():
        if count := int((~weight.isfinite()).sum()):
            raise ModelError(
                f"layer {name} has {count} NaN or infinite weights: repair the checkpoint, or pass exclude={name!r}"
            )
    return weights


def plain_options(selection: SelectOptions) -> dict[str, Any]:
    """The options of `select` as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, SpeedPlan):
            return value.description
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return list(value)
        return value if value is None else str(value)

    named = selection.get("plan")
    if isinstance(named, str | Path):
        selection = {**selection, "plan": load_plan(named)}
    return {key: plain(value) for key, value in selection.items()}


def _lay_out(
    name: str, module: nn.Module, rule: Pattern, order: Order, remainder: Remainder
) -> tuple[Layout | None, str]:
    """How a layer's blocks lie, or None, and the reason."""
    kind = kind_of(module)
    assert kind is not None  # every other module was found unusable
    groups = int(getattr(module, "groups", 1))
    layout = Layout(kind, _shape(module), rule.size, groups, order, pad=True)
    if layout.virtual and remainder != "pad":
        what = "input channels" + (" per group" if groups > 1 else "") if order == "channels" else "weights per row"
        reason = f"{layout.columns} {what}, not divisible by {rule.size}"
        if remainder == "error":
            raise ModelError(f"layer {name}: {reason}; remainder='skip' keeps it dense, remainder='pad' pads it")
        return None, f"{reason} (remainder='pad' pads them)"
    layout = Layout(kind, layout.shape, rule.size, groups, order, pad=bool(layout.virtual))
    reason = "along input channels" if order == "channels" else "flat, as in the paper"
    if groups > 1:
        reason += f", within each of {groups} groups"
    if layout.virtual:
        reason += f", {layout.virtual} virtual columns"
    return layout, reason


def _unusable(name: str, module: nn.Module, owners: Mapping[int, Sequence[str]]) -> str | None:
    """Why a layer can never be masked, or None if it can."""
    if kind_of(module) is None:
        return "not a convolution or Linear"
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "not initialised yet: run the model once"
    if not has_weight(module):
        return "no weight"
    weight = weight_of(module)
    if weight.is_meta or weight.layout != torch.strided or not weight.is_floating_point():
        return f"not a dense floating-point weight: {weight.dtype}, {weight.layout}, on {weight.device.type}"
    if not weight.numel():
        return "empty weight"
    first = owners[_key(module)][0]
    if first != name:
        return f"shares its weight with {first}"
    if not zeros_stay_zero(module):
        return f"{type(module).__name__} transforms its weight when it runs, so zeros would not stay zero"
    return None


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """The names of the layers that use each weight, after those of other modules that share it."""
    foreign: dict[int, list[str]] = {}
    layers: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_inner(name):
            continue
        if kind_of(module) is not None:
            layers.setdefault(_key(module), []).append(name)
        else:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    foreign.setdefault(id(parameter), []).append(f"{name}.{key}".lstrip("."))
    return {key: foreign.get(key, []) + names for key, names in layers.items()}


def _is_inner(name: str) -> bool:
    """Whether the module is part of another module's parametrization."""
    return "parametrizations" in name.split(".")


def _key(module: nn.Module) -> int:
    return weight_key(module) if kind_of(module) is not None else 0


def _is_listed(name: str, module: nn.Module) -> bool:
    """Whether the table shows the module: convolutions, Linear, and any other module that directly holds a matrix."""
    if _is_inner(name):
        return False
    return kind_of(module) is not None or any(
        p is not None and not is_lazy(p) and sum(size > 1 for size in p.shape) > 1 for p in module._parameters.values()
    )


def _shape(module: nn.Module) -> tuple[int, ...]:
    if kind_of(module) is None:
        return max((tuple(p.shape) for p in module._parameters.values() if p is not None), key=len)
    if not has_weight(module):
        return ()
    lazy = any(is_lazy(parameter) for parameter in module.parameters(recurse=False))
    return () if lazy else tuple(weight_of(module).shape)


def _globs(option: str, given: Globs | None) -> tuple[str, ...] | None:
    """The value of an option as a tuple of strings."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    globs: tuple[Any, ...] = tuple(given) if several else (given,)
    if not all(isinstance(glob, str) for glob in globs):
        raise OptionError(f"{option} must be a string or a list of strings, got {given!r}")
    return globs


def _match(name: str, globs: tuple[str, ...] | None) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs or ())
