"""Which layers are masked, and for every other layer the reason why not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, overload

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halve.errors import ModelError, listed
from halve.masks.layout import ORDERS, Layout, Order
from halve.masks.pattern import Pattern
from halve.modules import KINDS, Kind, has_weight, kind_of, weight_key, weight_of, zeros_stay_zero
from halve.select.head import find_heads

Remainder = Literal["skip", "pad", "error"]
REMAINDERS: tuple[Remainder, ...] = ("skip", "pad", "error")
Globs = str | Sequence[str]
PatternRule = str | Pattern | Mapping[str, str | Pattern | None]


class SelectOptions(TypedDict, total=False):
    """The options of `select`, which `prune` takes too."""

    pattern: PatternRule
    include: Globs | None
    exclude: Globs | None
    also: Globs | None
    order: Order
    remainder: Remainder
    kinds: Sequence[Kind] | None


@dataclass(frozen=True)
class Choice:
    """One layer of a model: masked with `pattern` in `layout`, or left dense (`layout` is None), and why."""

    name: str
    type: str
    shape: tuple[int, ...]
    pattern: Pattern | None
    layout: Layout | None
    reason: str
    shared_with: tuple[str, ...] = ()

    @property
    def masked(self) -> bool:
        return self.layout is not None


class Selection(Sequence[Choice]):
    """Every layer of a model with the decision on it; prints as a table."""

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
        """The layers that are masked."""
        return [choice for choice in self if choice.masked]

    def __str__(self) -> str:
        rows = [(c.name, c.type, "x".join(map(str, c.shape)), str(c.pattern or "dense"), c.reason) for c in self]
        widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


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
) -> Selection:
    """Decide for every layer whether it is masked.

    By default every convolution and Linear whose input channels are a multiple of M is, except grouped and depthwise
    convolutions and the classifier head. Names may be globs such as "layer3.*":

    - `include`: only these; `exclude`: not these; `also`: these too, though the default leaves them out.
    - `pattern`: one for all, or a dict from globs to patterns, first match wins, None or no match leaves dense.
    - `order`: "channels", or "flat" as in the paper (cannot be accelerated).
    - `kinds`: only these of "linear", "conv", "conv_transpose".
    - `remainder`: for channels that are no multiple of M "skip" the layer, "pad" with virtual zero columns, or "error".

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    >>> print(select(model))
    0  Conv2d  8x3x3x3  dense  3 input channels are no multiple of 4 (remainder='pad' pads them)
    1  Conv2d  8x8x3x3  2:4    along input channels
    3  Linear  2x8      dense  classifier head (also='3' masks it)
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model must be a torch.nn.Module, not a {type(model).__name__}")
    rules = pattern if isinstance(pattern, Mapping) else {"*": pattern}
    patterns = {glob: None if rule is None else Pattern(rule) for glob, rule in rules.items()}
    only, never, extra = _globs(include), _globs(exclude), _globs(also)
    if order not in ORDERS or remainder not in REMAINDERS:
        raise ModelError(f"order={order!r}, remainder={remainder!r}: orders are {ORDERS}, remainders {REMAINDERS}")
    if strange := set(kinds or ()) - set(KINDS):
        raise ModelError(f"kinds={listed(strange)}: there are {listed(KINDS)}")
    layers = [(name, module) for name, module in model.named_modules() if _is_listed(name, module)]
    for glob in (*(only or ()), *(never or ()), *(extra or ()), *patterns):
        if glob != "*" and not any(fnmatchcase(name, glob) for name, _ in layers):
            raise ModelError(
                f"{glob!r} matches no layer of {type(model).__name__}; its layers are {listed(n for n, _ in layers)}"
            )
    heads = find_heads(model)
    owners = _owners(model)

    def decide(name: str, module: nn.Module) -> tuple[Pattern | None, Layout | None, str]:
        named = _match(name, extra)
        if reason := _unusable(name, module, owners):
            return None, None, reason
        if only is not None and not _match(name, only) and not named:
            return None, None, "not in include"
        if kinds is not None and kind_of(module) not in kinds and not named:
            return None, None, f"only {listed(kinds)} layers are asked for"
        if never is not None and _match(name, never):
            return None, None, "in exclude"
        rule = next((rule for glob, rule in patterns.items() if fnmatchcase(name, glob)), None)
        if rule is None:
            return None, None, "no pattern for it"
        groups = int(getattr(module, "groups", 1))
        if not heads.isdisjoint((name, *owners[_key(module)])) and not named:
            return None, None, f"classifier head (also={name!r} masks it)"
        if groups > 1 and not named:
            word = "depthwise" if groups == module.in_channels else f"grouped ({groups} groups)"
            return None, None, f"{word} convolution (also={name!r} masks inside each group)"
        return _lay_out(name, module, rule, order, remainder)

    choices = []
    for name, module in layers:
        rule, layout, reason = decide(name, module)
        shape = _shape(module)
        shared = tuple(other for other in owners.get(_key(module), ()) if other != name) if layout else ()
        choices.append(Choice(name, type(module).__name__, shape, rule, layout, reason, shared))
    return Selection(choices)


def plain_options(selection: SelectOptions) -> dict[str, Any]:
    """The options of `select` as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return list(value)
        return value if value is None else str(value)

    return {key: plain(value) for key, value in selection.items()}


def _lay_out(
    name: str, module: nn.Module, rule: Pattern, order: Order, remainder: Remainder
) -> tuple[Pattern | None, Layout | None, str]:
    kind = kind_of(module)
    assert kind is not None  # every other module was found unusable
    groups = int(getattr(module, "groups", 1))
    layout = Layout(kind, _shape(module), rule.size, groups, order, pad=True)
    if layout.virtual and remainder != "pad":
        what = "input channels" + (" per group" if groups > 1 else "") if order == "channels" else "weights in a row"
        reason = f"{layout.columns} {what} are no multiple of {rule.size}"
        if remainder == "error":
            raise ModelError(f"layer {name}: {reason}; remainder='skip' leaves it dense, remainder='pad' pads it")
        return None, None, f"{reason} (remainder='pad' pads them)"
    layout = Layout(kind, layout.shape, rule.size, groups, order, pad=bool(layout.virtual))
    reason = "along input channels" if order == "channels" else "flat, as in the paper"
    if groups > 1:
        reason += f", inside each of {groups} groups"
    if layout.virtual:
        reason += f", {layout.virtual} virtual columns"
    return rule, layout, reason


def _unusable(name: str, module: nn.Module, owners: Mapping[int, Sequence[str]]) -> str | None:
    """Why a layer can never be masked, None if it can."""
    if kind_of(module) is None:
        return "no convolution or Linear"
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "not initialised yet: run the model once"
    if not has_weight(module):
        return "it has no weight"
    weight = weight_of(module)
    if weight.is_meta or weight.layout != torch.strided or not weight.is_floating_point():
        return f"its weight is {weight.dtype} on {weight.device.type}, {weight.layout}: no dense floating-point numbers"
    if not weight.numel():
        return "its weight is empty"
    first = owners[_key(module)][0]
    if first != name:
        return f"shares its weight with {first}"
    if not zeros_stay_zero(module):
        return f"{type(module).__name__} changes its weight when it runs, so zeros would not stay zero"
    return None


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """For each weight the names of the layers that use it; another kind of module that shares it comes first."""
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
    """Whether this module is part of how another one's weight is computed."""
    return "parametrizations" in name.split(".")


def _key(module: nn.Module) -> int:
    return weight_key(module) if kind_of(module) is not None else 0


def _is_listed(name: str, module: nn.Module) -> bool:
    """Layers in the table: convolutions and Linear, and whatever else directly holds a matrix."""
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


def _globs(globs: Globs | None) -> tuple[str, ...] | None:
    return globs if globs is None else (globs,) if isinstance(globs, str) else tuple(globs)


def _match(name: str, globs: tuple[str, ...] | None) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs or ())
