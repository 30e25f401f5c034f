"""What masks cost in minutes and images, as a table and figures, from experiments/results/budgets.json."""

import functools
from collections.abc import Callable
from typing import Any

from charts import Panel, Point, panels
from page_text import prose, table
from records import measured_on, name_of, recorded_if_any, span

Record = dict[str, Any]
ONE_SHOT = {"magnitude": "magnitude", "magnitude_permuted": "magnitude, permuted", "reconstruct": "reconstruct"}
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
COLOURS = {"halve": "learned", "magnitude": "magnitude, permuted", "dense": "reconstruct"}
DRAWN = {"halve": "halve", "magnitude_permuted": "magnitude", "reconstruct": "dense"}  # method -> colour


def by_network() -> dict[tuple[str, str], list[Record]]:
    """The records by network and device, without those for which nothing was learned."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in recorded_if_any("experiments/results/budgets.json"):
        found.setdefault((record["network"], record["device"]), []).append(record)
    return {key: records for key, records in found.items() if any(r["method"] == "halve" for r in records)}


def agreement(records: list[Record]) -> Point:
    """Agreement on what was held back, in percent: of the images that look most like those of the evaluation."""
    return Point.of([100 * next(value for key, value in r.items() if key.startswith("agreement_")) for r in records])


def by_budget(records: list[Record], method: str) -> dict[tuple[int, float], list[Record]]:
    """The records of a method by images and minutes, the fewest first; masks in one shot have 0 minutes."""
    found: dict[tuple[int, float], list[Record]] = {}
    for record in records:
        if record["method"] == method:
            found.setdefault((record["images"], record.get("minutes", 0.0)), []).append(record)
    return dict(sorted(found.items()))


def budgets() -> str:
    """A section of the page: agreement by images and minutes. Nothing if nothing was measured."""
    parts = []
    for (network, device), records in by_network().items():
        rows = []
        for (images, minutes), learned in by_budget(records, "halve").items():
            others = [by_budget(records, method).get((images, 0.0)) for method in ONE_SHOT]
            steps = span([r["steps_done"] for r in learned], "{:,}")
            shown = [
                _percent(agreement(learned)),
                *("" if some is None else _percent(agreement(some)) for some in others),
            ]
            rows.append([f"{images:,}", f"{minutes:g}", steps, *shown])
        heads = ["images", "minutes", "steps", "learned, %", *(f"{name}, %" for name in ONE_SHOT.values())]
        picture = f"![{_title(network, device)}, by minutes and by images](../figures/{_file(network, device)}.svg)"
        learned = [r for r in records if r["method"] == "halve"]
        note = f"{name_of(network)} on {DEVICES[device]} ({measured_on(learned)}; `experiments/budgets.py`)."
        parts += [picture, table(heads, rows), prose(note)]
    if not parts:
        return ""
    about = (
        "How often masks keep the dense network's prediction, by the images and the minutes that `halve.learn` gets, "
        "measured on training images that are held back. One-shot masks are made from the same images."
    )
    return "\n\n".join(["## Few images, few minutes", prose(about), *parts])


def figures() -> dict[str, Callable[[], str]]:
    """The figures of the section, by the name of the file."""
    return {_file(*key): functools.partial(_figure, *key) for key in by_network()}


def _figure(network: str, device: str) -> str:
    """Agreement against minutes, and against images; masks in one shot take no minutes."""
    records = by_network()[network, device]
    most = max(r["images"] for r in records if r["method"] == "halve")
    learned = by_budget(records, "halve")
    minutes = [limit for images, limit in learned if images == most]
    limits = {limit for images, limit in learned if images < most}
    over_time: dict[str, list[tuple[float, Point]]] = {}
    over_images: dict[str, list[tuple[float, Point]]] = {}
    for method, colour in DRAWN.items():
        found = {budget: agreement(some) for budget, some in by_budget(records, method).items()}
        if method == "halve":
            over_time[colour] = [(limit, point) for (images, limit), point in found.items() if images == most]
            over_images[colour] = [(images, point) for (images, limit), point in found.items() if limit in limits]
        else:
            over_time[colour] = [(limit, found[most, 0.0]) for limit in minutes if (most, 0.0) in found]
            over_images[colour] = [(images, point) for (images, _), point in found.items()]
    shown = [Panel(f"{most:,} images", "minutes", _drawn(over_time), {m: f"{m:g}" for m in minutes}, False, "{:g} %")]
    if limits:
        counts = sorted({images for curve in over_images.values() for images, _ in curve})
        limit = " or ".join(f"{one:g}" for one in sorted(limits))
        names = {count: f"{int(count):,}" for count in counts}
        shown.append(Panel(f"{limit} minutes", "images", _drawn(over_images), names, False, "{:g} %"))
    note = ["Training images that are held back. Masks in one shot: from the same images.", measured_on(records)]
    return panels(_title(network, device), shown, COLOURS, note)


def _drawn(curves: dict[str, list[tuple[float, Point]]]) -> dict[str, list[tuple[float, Point]]]:
    return {kind: curve for kind, curve in curves.items() if curve}


def _title(network: str, device: str) -> str:
    return f"{name_of(network)}, masks learned on {DEVICES[device]}: agreement with the dense network"


def _file(network: str, device: str) -> str:
    return f"budgets-{network.replace('_', '-')}-{device}"


def _percent(point: Point) -> str:
    return f"{point.mean:.1f}" + (f" ({span([point.low, point.high], '{:.1f}')})" if point.low < point.high else "")
