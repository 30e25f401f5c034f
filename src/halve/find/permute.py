"""Channel orders that keep a network's function and let blocks keep more of a score.

The captured graph says which channels must move together; for each such set the order is searched that keeps most in
all masked layers that read it. Codes still refer to the original checkpoint, through the order in each mask's layout.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halve.errors import ModelError
from halve.find.batches import Forward, Progress, run
from halve.find.channels.axes import Axis, Spans
from halve.find.channels.trace import Channels
from halve.find.select import Choice
from halve.find.swaps import best_order
from halve.graph import Captured, capture
from halve.masks.layers import clone
from halve.masks.layout import Layout
from halve.masks.moves import Moves, move_
from halve.masks.pattern import Pattern

SECONDS = 120.0


@dataclass(frozen=True)
class Permutation:
    """The outcome: the choices with their channel orders, the moves that go with them, and what was gained."""

    choices: tuple[Choice, ...]
    moves: Moves
    summary: dict[str, Any]


@dataclass(frozen=True)
class _Reader:
    """A masked layer's scores of the channels of one axis: (rows, channels)."""

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
    """Search for channel orders in which `scores` (of the weights' shapes, not negative) keep more.

    Layers whose channels cannot move keep their order; the summary says why. Before anything is returned the model is
    run with its channels moved, and must give the same outputs on the example.
    """
    started = time.monotonic()
    captured = capture(model, example, forward)
    channels = Channels(captured)
    names = _first_names(model)
    inputs = {choice.name: _input_spans(model, choice, channels, names) for choice in choices}
    readers, axes = _readers(choices, inputs, scores)
    orders, kept = _search(readers, axes, started + seconds, seed, progress)
    result = tuple(_with_order(choice, inputs[choice.name], orders) for choice in choices)
    moves = moves_of(channels, orders)
    _check_same_function(model, moves, example, forward)
    summary = {
        "axes": len(orders),
        "layers": sum(choice.layout.channel_order is not None for choice in result if choice.layout),
        "fixed": _fixed(choices, inputs, captured),
        "kept_before": kept[0],
        "kept_after": kept[1],
        "finished": kept[2],
        "seconds": round(time.monotonic() - started, 1),
    }
    return Permutation(result, moves, summary)


def _readers(
    choices: Sequence[Choice], inputs: Mapping[str, Spans | None], scores: Mapping[str, Tensor]
) -> tuple[dict[int, list[_Reader]], dict[int, Axis]]:
    """For each axis the scores of the layers that read it in whole blocks."""
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
    """(rows x positions, channels), over their mean: no layer counts more because its numbers are larger."""
    plain = dataclasses.replace(layout, channel_order=None, pad=False, block=1)
    table = plain.to_blocks(scores.float()).reshape(-1, layout.channels)
    table = table - table.min().clamp(max=0)
    return table / table.mean().clamp(min=torch.finfo(table.dtype).tiny)


def _search(
    readers: Mapping[int, list[_Reader]],
    axes: Mapping[int, Axis],
    deadline: float,
    seed: int,
    progress: Progress | None,
) -> tuple[dict[int, tuple[int, ...]], tuple[float, float, bool]]:
    """The order of each axis, and the mean share of the score that is kept before, after, and whether time sufficed."""
    costs = {key: axes[key].size ** 2 * sum(len(r.scores) for r in found) for key, found in readers.items()}
    before = after = weight = 0.0
    finished = True
    orders = {}
    track = progress or (lambda items, _: items)
    left = sum(costs.values())
    for key in track(sorted(readers, key=lambda key: costs[key]), "channel orders"):
        pattern = readers[key][0].pattern
        together = torch.cat([reader.scores for reader in readers[key] if reader.pattern == pattern])
        share = (deadline - time.monotonic()) * costs[key] / max(left, 1)
        found = best_order(together, pattern, seconds=share, seed=seed)
        left -= costs[key]
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
    """The order of a whole dimension; None where nothing moves along it."""
    if not any(id(span.axis) in orders for span in spans):
        return None
    result: list[int] = []
    for axis, repeat in spans:
        at = len(result)
        channels = orders.get(id(axis), range(axis.size))
        result.extend(at + channel * repeat + pixel for channel in channels for pixel in range(repeat))
    return tuple(result)


def moves_of(channels: Channels, orders: Mapping[int, tuple[int, ...]]) -> Moves:
    """What moves when these axes take these orders; keys are the axes' ids."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal orders become one object
    moves: dict[str, dict[int, tuple[int, ...]]] = {}
    for (tensor, dim), spans in channels.items():
        order = _order_along(spans, orders)
        if order is not None:
            moves.setdefault(tensor, {})[dim] = known.setdefault(order, order)
    return moves


def _check_same_function(model: nn.Module, moves: Moves, example: Any, forward: Forward | None) -> None:
    """Trust is good: run the model with its channels moved and compare."""
    dense = clone(model).eval()
    copy = clone(dense)
    move_(copy, moves)
    with torch.no_grad():
        expected, got = (run(net, example, forward).double() for net in (dense, copy))
    scale = float(expected.abs().max())
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    error = float((expected - got).abs().max())
    if not error <= max(scale, 1e-30) * torch.finfo(dtype).eps ** 0.5:
        raise ModelError(
            f"moving channels changed the outputs of {type(model).__name__} by up to {error:.2g} (of {scale:.2g}): "
            f"part of it reads channels in a way that the captured graph does not show; learn or prune without permute"
        )


def _input_spans(model: nn.Module, choice: Choice, channels: Channels, names: Mapping[int, str]) -> Spans | None:
    weight = model.get_submodule(choice.name)._parameters.get("weight")
    layout = choice.layout
    if weight is None or layout is None or layout.groups > 1 or layout.order != "channels":
        return None
    return channels.along(names[id(weight)], 0 if layout.kind == "conv_transpose" else 1)


def _fixed(choices: Sequence[Choice], inputs: Mapping[str, Spans | None], captured: Captured) -> dict[str, str]:
    """Masked layers whose channels all stay where they are, and why."""
    result = {}
    for choice in choices:
        spans = inputs[choice.name]
        if spans is None:
            result[choice.name] = captured.left.get(choice.name, "not in the captured graph, grouped or flat")
        elif all(span.axis.pinned for span in spans):
            result[choice.name] = next(str(span.axis.pinned) for span in spans)
    return result


def _first_names(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in reversed(list(model.named_parameters(remove_duplicate=False)))}
