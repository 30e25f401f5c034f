"""The layers of the network: which are masked, why not the others, what each mask costs, and what it saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halve.markup import text
from halve.masks.mask import MaskSet
from halve.modules import weight_name
from halve.report import figures as f
from halve.report.chart import followed
from halve.report.files import mapping, number, words
from halve.report.tables import Cell, amount, label, table
from halve.report.timings import LayerTime, Timings

State = Literal["sparse", "unused", "dense", "out"]
STATES: dict[State, str] = {  # and how the legend names them
    "sparse": "masked",
    "unused": "masked, runs dense",
    "dense": "left dense",
    "out": "not masked",
}


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a layer. None is unknown."""

    name: str
    state: State
    reason: str
    pattern: str = ""
    weights: int | None = None
    feature_error: float | None = None
    agreement: float | None = None
    kl: float | None = None
    time: LayerTime | None = None


def layers_of(masks: MaskSet, timings: Timings | None, losses: Any) -> list[LayerFacts]:
    """The layers of a network in its order, as far as that is known.

    Args:
        masks: The masks, whose recipe names the layers that are not masked.
        timings: Times of the layers.
        losses: What is lost when each layer alone is masked, by layer, from `halve evaluate --per-layer`.
    """
    recipe, times = masks.recipe, timings.layers if timings else {}
    left = {name: number(cost) for name, cost in mapping(recipe.get("left_dense")).items() if isinstance(name, str)}
    others = {name: words(why) for name, why in mapping(recipe.get("not_masked")).items() if isinstance(name, str)}
    found = []
    for name in _in_order(masks, [*masks, *left, *others]):
        time, lost = times.get(name), mapping(mapping(losses).get(name))
        state: State = "sparse" if name in masks else "dense" if name in left else "out"
        reason, pattern = others.get(name, ""), ""
        if name in masks:
            pattern = str(masks[name].pattern)
            if time is not None and time.runs_sparse is False:
                state, reason = "unused", time.reason or "not faster sparse"
        elif name in left:
            cost = left[name]
            reason = "left dense for accuracy" + ("" if cost is None else f": its mask costs a KL of {f.small(cost)}")
        found.append(
            LayerFacts(
                name,
                state,
                reason,
                pattern,
                masks[name].layout.weights if name in masks else None,
                number(lost.get("feature_error")),
                number(lost.get("agreement")),
                number(lost.get("kl")),
                time,
            )
        )
    return found


def strip(layers: Sequence[LayerFacts]) -> str:
    """The network from input to output, one box for each layer."""
    width = 100 / len(layers)
    gap = min(0.3, width / 6)
    boxes = "".join(
        f'<rect class="{one.state}" x="{i * width + gap / 2:.3f}%" width="{width - gap:.3f}%" height="100%" rx="2"/>'
        for i, one in enumerate(layers)
    )
    counts = {state: sum(one.state == state for one in layers) for state in STATES}
    legend = "".join(
        f'<span class="key {state}">{STATES[state]} ({count})</span>' for state, count in counts.items() if count
    )
    summary = ", ".join(f"{count} {STATES[state]}" for state, count in counts.items() if count)
    title = "The network from input to output"
    drawn = f'<svg class="strip" role="img" aria-label="{text(f"{title}: {summary}")}">{boxes}</svg>'
    points = [((i + 0.5) / len(layers), _said(one), f"layer-{i}") for i, one in enumerate(layers)]
    return (
        f'<figure><figcaption><h3>{title}</h3><span class="legend">{legend}</span></figcaption>'
        f"{followed(drawn, title, points)}</figure>"
    )


def layer_table(layers: Sequence[LayerFacts], timings: Timings | None) -> str:
    """All layers with what is known of them; a column appears if a layer has a value for it."""
    columns: list[tuple[str, list[Cell]]] = [
        ("layer", [label(one.name, "name") for one in layers]),
        ("state", [_state(one) for one in layers]),
    ]

    def numbers(name: str, values: Sequence[float | None], shown: Any, kind: str) -> None:
        known = [value for value in values if value is not None]
        if known:
            largest = max(known)
            columns.append((f">{name}", [amount(shown(value), value, largest, kind) for value in values]))

    numbers("weights", [one.weights for one in layers], f.count, "neutral")
    numbers("feature error", [one.feature_error for one in layers], f.percent, "lost")
    flips = [None if one.agreement is None else 1 - one.agreement for one in layers]
    numbers("predictions changed by it alone", flips, lambda share: f.percent(share, 2), "lost")
    numbers("KL", [one.kl for one in layers], f.small, "lost")
    times = [one.time or LayerTime(None, None) for one in layers]
    slowest = max((t for time in times for t in (time.dense_ms, time.sparse_ms) if t is not None), default=None)
    if slowest is not None:
        columns.append((">dense ms", [amount(f.ms(time.dense_ms), time.dense_ms, slowest, "dense") for time in times]))
        cells = [amount(f.ms(time.sparse_ms), time.sparse_ms, slowest, "sparse") for time in times]
        columns.append((">sparse ms", cells))
    if any(time.kernel for time in times):
        columns.append(("kernel", [label(time.kernel or "-", "name") for time in times]))
    cells_by_row = zip(*(cells for _, cells in columns), strict=True)
    rows = [(f"layer-{i}", list(cells)) for i, cells in enumerate(cells_by_row)]
    note = ""
    if slowest is not None and timings is not None:
        batch = "" if timings.batch is None else f"batch {timings.batch}"
        note = f'<p class="under">Times: {text(", ".join(filter(None, (timings.where, batch))))}</p>'
    return table("Layers", [name for name, _ in columns], rows) + note


def _state(one: LayerFacts) -> Cell:
    shown = f"{one.pattern}, runs dense" if one.state == "unused" else one.pattern or STATES[one.state]
    return label(shown, f"state {one.state}", one.reason)


def _said(one: LayerFacts) -> str:
    parts = [one.pattern or STATES[one.state], one.reason, "" if one.weights is None else f"{one.weights:,} weights"]
    return f"{one.name}: {', '.join(filter(None, parts))}"


def _in_order(masks: MaskSet, names: Sequence[str]) -> list[str]:
    """Layers in the order of the state dict that the masks were made for; those that are not in it come last."""
    place: Mapping[str, int] = {}
    if masks.digests is not None:
        place = {name: i for i, name in enumerate([*masks.digests.dense, *masks.digests.tied])}
    known = dict.fromkeys(names)
    return sorted(known, key=lambda name: place.get(weight_name(name), len(place)))
