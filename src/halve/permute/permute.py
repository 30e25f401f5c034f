"""Find channel orders in which blocks keep more of a score, without changing the network's function.

The captured graph shows which channels must move together. For each such set, one order is searched that keeps the most
in all masked layers that read it. Codes still refer to the checkpoint: each mask's layout has its channel order.
"""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halve.batches import Forward, Progress, images_of, to_device, tracked
from halve.errors import MaskError, ModelError, OptionError, listed
from halve.graph import Captured, capture
from halve.masks.layout import Layout
from halve.masks.moves import Moves, move_
from halve.masks.pattern import Pattern
from halve.modules import clone
from halve.permute.equivalence import Equivalence
from halve.permute.search import best_order
from halve.permute.trace.axes import Axis, Spans
from halve.permute.trace.channels import Channels
from halve.select.select import Choice

SECONDS = 120.0
_SUMMARY = {
    "axes": (int,),
    "layers": (int,),
    "fixed": (dict,),
    "not_whole": (str,),
    "not_run": (list,),
    "kept_before": (int, float),
    "kept_after": (int, float),
    "finished": (bool,),
    "seconds": (int, float),
}
_OVERSHARE = 3.0  # times its share of the remaining time: most searches end sooner
_SHORTEST = 0.5  # seconds: small sets of channels come first and need almost no time


@dataclass(frozen=True)
class Permutation:
    """The choices with their channel orders, the moves that belong to them, and a summary for the recipe."""

    choices: tuple[Choice, ...]
    moves: Moves
    summary: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """The permutation as JSON values, for a run state."""
        numbers: dict[tuple[int, ...], int] = {}
        layers = {
            choice.name: numbers.setdefault(choice.layout.channel_order, len(numbers))
            for choice in self.choices
            if choice.layout is not None and choice.layout.channel_order is not None
        }
        moves = {
            name: {str(dim): numbers.setdefault(order, len(numbers)) for dim, order in dims.items()}
            for name, dims in self.moves.items()
        }
        return {"orders": list(map(list, numbers)), "layers": layers, "moves": moves, "summary": self.summary}

    @classmethod
    def restored(cls, choices: Sequence[Choice], plain: Mapping[str, Any]) -> "Permutation":
        """The inverse of `plain`, given the same choices without their channel orders.

        Raises `MaskError` for anything that `plain` does not return.
        """
        _check_plain(choices, plain)
        orders = [tuple(order) for order in plain["orders"]]
        layers = {name: orders[number] for name, number in plain["layers"].items()}
        moves = {name: {int(d): orders[n] for d, n in dims.items()} for name, dims in plain["moves"].items()}
        result = [
            dataclasses.replace(c, layout=dataclasses.replace(c.layout, channel_order=layers[c.name]))
            if c.layout is not None and c.name in layers
            else c
            for c in choices
        ]
        return cls(tuple(result), moves, dict(plain["summary"]))


def _check_plain(choices: Sequence[Choice], plain: Mapping[str, Any]) -> None:
    """Raise `MaskError` for what no permutation of these choices looks like: a file may hold anything."""
    if plain.keys() != {"orders", "layers", "moves", "summary"}:
        raise MaskError(f"channel orders need the keys orders, layers, moves and summary, got {listed(plain)}")
    orders, layers, moves = plain["orders"], plain["layers"], plain["moves"]
    if not isinstance(orders, list) or not all(isinstance(order, list) for order in orders):
        raise MaskError("orders must be a list of lists")
    for number, order in enumerate(orders):
        if not all(type(channel) is int for channel in order) or sorted(order) != list(range(len(order))):
            raise MaskError(f"order {number} is not a permutation of 0..{len(order) - 1}")
    if not isinstance(layers, dict) or not isinstance(moves, dict):
        raise MaskError("layers and moves must be objects")
    if not all(isinstance(dims, dict) for dims in moves.values()):
        raise MaskError("each of the moves must be an object")
    if unknown := layers.keys() - {choice.name for choice in choices}:
        raise MaskError(f"no masked layer is called {listed(sorted(unknown))}")
    numbers = [*layers.values(), *(number for dims in moves.values() for number in dims.values())]
    if not all(type(number) is int and 0 <= number < len(orders) for number in numbers):
        raise MaskError(f"layers and moves must refer to orders 0..{len(orders) - 1}")
    if not all(re.fullmatch("[0-9]", dim) for dims in moves.values() for dim in dims):
        raise MaskError("moves must be along dimensions 0..9")
    check_summary(plain["summary"])


def check_summary(summary: Any) -> None:
    """Raise `MaskError` for what is not the summary of a permutation."""
    if not isinstance(summary, dict) or summary.keys() != _SUMMARY.keys():
        raise MaskError(f"the summary of channel orders must have the keys {', '.join(_SUMMARY)}")
    for key, kinds in _SUMMARY.items():
        value = summary[key]
        number = isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < 1e15
        if type(value) not in kinds or number:
            raise MaskError(f"the summary of channel orders has {key}={str(value)[:40]!r}")
    texts = [*summary["fixed"].values(), *summary["not_run"]]
    if not all(isinstance(text, str) for text in texts):
        raise MaskError("the summary of channel orders must name layers and reasons")


@dataclass(frozen=True)
class _Reader:
    """A masked layer's scores along one axis: (rows, channels)."""

    pattern: Pattern
    scores: Tensor


def permute(
    model: nn.Module,
    choices: Sequence[Choice],
    scores: Mapping[str, Tensor],
    example: Any,
    *,
    forward: Forward | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Permutation:
    """Search for channel orders in which blocks keep more of the scores.

    Layers whose channels cannot move keep their order; the summary says why. The result is only returned if the model
    gives the same outputs with its channels moved.

    Args:
        model: The model. It is not changed.
        choices: The masked layers.
        scores: Scores by layer name, in the shape of the weights.
        example: A batch to capture the model on.
        forward: How to run the model on a batch, if unusual.
        seconds: Time limit of the search. Default: 120.
        seed: Seed of the search.
        progress: Progress display.
    """
    check_seconds(seconds)
    started = time.monotonic()
    example = to_device(example if forward is not None else images_of(example), model)
    [captured] = (capture(model, batch, forward) for batch in tracked([example], progress, "capturing the network"))
    equivalence = Equivalence(model, example, forward)
    channels = Channels(captured)
    names = _first_names(model)
    not_run = _not_run(model, channels, names)
    if not_run and not _trace_training_(channels, model, example, forward, not_run, names):
        channels.pin(f"{listed(not_run, 3)} did not run on the example, and may read it in training")
    inputs = {choice.name: _input_spans(model, choice, channels, names) for choice in choices}
    readers, axes = _readers(choices, inputs, scores)
    orders, kept = _search(readers, axes, time.monotonic() + seconds, seed, progress)  # capturing is not searching
    result = tuple(_with_order(choice, inputs[choice.name], orders) for choice in choices)
    moves = moves_of(channels, orders)
    move_(equivalence.copy, moves)
    equivalence.check()
    summary = {
        "axes": len(orders),
        "layers": sum(choice.layout.channel_order is not None for choice in result if choice.layout),
        "fixed": {
            c.name: _why(c, inputs[c.name], captured, kept[2])
            for c in result
            if c.layout and not c.layout.channel_order
        },
        "not_whole": captured.reason,
        "not_run": not_run,
        "kept_before": kept[0],
        "kept_after": kept[1],
        "finished": kept[2],
        "seconds": round(time.monotonic() - started, 1),
    }
    return Permutation(result, moves, summary)


def check_seconds(seconds: float) -> float:
    """The time limit of a search; raises `OptionError` if it is not a number of at least 0."""
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise OptionError(f"permute_seconds must be a number of at least 0, got {seconds!r}")
    return seconds


def _readers(
    choices: Sequence[Choice], inputs: Mapping[str, Spans | None], scores: Mapping[str, Tensor]
) -> tuple[dict[int, list[_Reader]], dict[int, Axis]]:
    """For each axis, the scores of the layers that read it in complete blocks."""
    readers: dict[int, list[_Reader]] = {}
    axes: dict[int, Axis] = {}
    for choice in choices:
        spans, layout, pattern = inputs[choice.name], choice.layout, choice.pattern
        if spans is None or layout is None or pattern is None:
            continue
        table = _relative(layout, scores[choice.name])
        at = 0
        for axis, repeat in spans:
            whole = repeat == 1 and at % pattern.size == 0 and axis.size % pattern.size == 0
            if whole and axis.pinned is None and axis.size > pattern.size:
                axes[id(axis)] = axis
                readers.setdefault(id(axis), []).append(_Reader(pattern, table[:, at : at + axis.size]))
            at += axis.size * repeat
    return readers, axes


def _relative(layout: Layout, scores: Tensor) -> Tensor:
    """Scores divided by their mean, (rows x positions, channels), so that all layers count the same."""
    plain = dataclasses.replace(layout, channel_order=None, pad=False, block=1)
    table = plain.to_blocks(scores.double()).reshape(-1, layout.channels)
    table = table / table.abs().max().clamp(min=1e-300)
    table = table - table.min().clamp(max=0)
    return (table / table.mean().clamp(min=1e-30)).float()


def _search(
    readers: Mapping[int, list[_Reader]],
    axes: Mapping[int, Axis],
    deadline: float,
    seed: int,
    progress: Progress | None,
) -> tuple[dict[int, tuple[int, ...]], tuple[float, float, bool]]:
    """The order of each axis, and (share of the scores kept before, after, whether all searches finished)."""
    costs = {key: axes[key].size ** 2 * sum(len(r.scores) for r in found) for key, found in readers.items()}
    before = after = weight = 0.0
    finished = True
    orders = {}
    cost_left = sum(costs.values())
    for key in tracked(sorted(readers, key=lambda key: costs[key]), progress, "channel orders"):
        pattern = readers[key][0].pattern
        together = torch.cat([reader.scores for reader in readers[key] if reader.pattern == pattern])
        time_left = deadline - time.monotonic()
        share = min(time_left, max(_SHORTEST, time_left * _OVERSHARE * costs[key] / cost_left))
        found = best_order(together, pattern, seconds=share, seed=seed)
        cost_left -= costs[key]
        total = float(together.sum())
        before, after, weight = before + found.kept_before * total, after + found.kept_after * total, weight + total
        finished = finished and found.finished
        if found.kept_after > found.kept_before:
            orders[key] = tuple(found.order.tolist())
    return orders, (before / max(weight, 1e-30), after / max(weight, 1e-30), finished)


def _with_order(choice: Choice, spans: Spans | None, orders: Mapping[int, tuple[int, ...]]) -> Choice:
    order = None if spans is None else _order_along(spans, orders)
    if order is None or choice.layout is None:
        return choice
    return dataclasses.replace(choice, layout=dataclasses.replace(choice.layout, channel_order=order))


def _order_along(spans: Spans, orders: Mapping[int, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The order of a tensor dimension; None if nothing moves along it."""
    if not any(id(span.axis) in orders for span in spans):
        return None
    result: list[int] = []
    for axis, repeat in spans:
        at = len(result)
        channels = orders.get(id(axis), range(axis.size))
        result.extend(at + channel * repeat + pixel for channel in channels for pixel in range(repeat))
    return tuple(result)


def moves_of(channels: Channels, orders: Mapping[int, tuple[int, ...]]) -> Moves:
    """The moves of all tensors when axes, given by id, take these orders."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal orders become one object
    moves: dict[str, dict[int, tuple[int, ...]]] = {}
    for (tensor, dim), spans in channels.items():
        order = _order_along(spans, orders)
        if order is not None:
            moves.setdefault(tensor, {})[dim] = known.setdefault(order, order)
    return moves


def _input_spans(model: nn.Module, choice: Choice, channels: Channels, names: Mapping[int, str]) -> Spans | None:
    weight = model.get_submodule(choice.name)._parameters.get("weight")
    layout = choice.layout
    if weight is None or layout is None or layout.groups > 1 or layout.order != "channels":
        return None
    return channels.along(names[id(weight)], 0 if layout.kind == "conv_transpose" else 1)


def _why(choice: Choice, spans: Spans | None, captured: Captured, finished: bool) -> str:
    """Why the input channels of a layer keep their order."""
    layout = choice.layout
    assert layout is not None
    if layout.order == "flat":
        return "its blocks do not run along channels"
    if layout.groups > 1:
        return "grouped convolution"
    if spans is None:
        return captured.uncaptured.get(choice.name, "its weight is computed, or not in the captured graph")
    if all(span.axis.pinned for span in spans):
        return next(str(span.axis.pinned) for span in spans)
    if any(span.repeat > 1 for span in spans):
        return "several neighbouring weights belong to one channel"
    return "no better order was found" if finished else "no better order was found before the time limit"


def _trace_training_(
    channels: Channels,
    model: nn.Module,
    example: Any,
    forward: Forward | None,
    not_run: Sequence[str],
    names: Mapping[int, str],
) -> bool:
    """Trace what layers read that only run in training, such as auxiliary heads; False if some still do not run."""
    training = clone(model)
    for module in training.modules():  # containers take their training branch; nothing is random or tracks statistics
        module.training = not isinstance(module, _BatchNorm | nn.modules.dropout._DropoutNd)
    try:
        channels.add(capture(training, example, forward, keep_modes=True))
    except ModelError:
        return False
    return not _not_run(model, channels, names)


def _not_run(model: nn.Module, channels: Channels, names: Mapping[int, str]) -> list[str]:
    """Modules with parameters or buffers that no captured operation reads, such as auxiliary heads.

    Such a tensor may be applied to channels when it runs, or select some of them, so these must not move.
    """
    found: dict[str, None] = {}
    for owner, module in model.named_modules():
        if isinstance(module, nn.modules.loss._Loss):
            continue  # reads outputs of the model, which do not move
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.numel() < 2 or key in module._non_persistent_buffers_set:
                continue
            if names[id(tensor)] not in channels.read:
                found[owner or key] = None
    return list(found)


def _first_names(model: nn.Module) -> dict[int, str]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {id(tensor): name for name, tensor in reversed(named)}
