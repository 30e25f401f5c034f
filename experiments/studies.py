"""What the studies of the paper's tables and of mask reuse found, for tables and figures; docs/figures/*.svg."""

from typing import Any

from drawing import drawing, line, lines, rect, text
from records import METHODS, measured_on, name_of, recorded_if_any

CONVERGED = 0.01  # top-1 lost at most, to count as converged
PAPER_METHODS = {
    method: METHODS[method] for method in ("dense", "magnitude", "magnitude_permuted", "paper", "paper_tuned", "halve")
}
REUSE_ARMS = {
    "dense": "dense, updated",
    "kept": "old mask",
    "relearned": "relearned from it",
    "fresh": "learned from scratch",
    "magnitude": "magnitude",
}
STROKES = {
    "dense": ("arrow", "8 5"),
    "kept": ("curve", ""),
    "relearned": ("curve", "3 4"),
    "fresh": ("other", ""),
    "magnitude": ("other", "3 4"),
}


def paper_records() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The records of the paper's tables, by images and network."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in recorded_if_any("experiments/results/paper_tables.json"):
        found.setdefault(record["data"], {}).setdefault(record["network"], []).append(record)
    return found


def longest(records: list[dict[str, Any]], method: str) -> dict[str, Any] | None:
    """The record of a method with the largest budget; of several seeds the first."""
    return max(
        (r for r in records if r["method"] == method), key=lambda r: (r["epochs"] or 0, -(r["seed"] or 0)), default=None
    )


def epochs_to_converge(records: list[dict[str, Any]], method: str) -> int | None:
    """The smallest budget within a point of the dense network's top-1; None if no budget is.

    >>> dense = {"method": "dense", "epochs": None, "seed": None, "top1": 0.7}
    >>> runs = [{"method": "halve", "epochs": e, "seed": 0, "top1": t} for e, t in ((1, 0.68), (3, 0.695), (9, 0.71))]
    >>> epochs_to_converge([dense, *runs], "halve")
    3
    """
    dense = longest(records, "dense")
    near = [
        r["epochs"]
        for r in records
        if dense is not None and r["method"] == method and r["top1"] >= dense["top1"] - CONVERGED
    ]
    return min(near, default=None)


def paper_figure() -> str:
    """Top-1 of the methods on each network, as bars."""
    title = "The paper's networks: top-1 with 2:4 masks"
    parts, left, full, y = [text(40, 44, title, "title")], 300.0, 480.0, 62.0
    kinds = {"dense": "dense", "halve": "halve"}
    everything = [r for networks in paper_records().values() for records in networks.values() for r in records]
    for data, networks in paper_records().items():
        parts.append(text(40, y + 20, data, "small"))
        y += 32
        for network, records in networks.items():
            for method, name in PAPER_METHODS.items():
                record = longest(records, method)
                if record is None:
                    continue
                budget = "" if record["epochs"] is None else f", {record['epochs']} epochs"
                parts.append(text(left - 16, y + 14, f"{name_of(network)}, {name}", "end"))
                parts.append(rect(left, y, full * record["top1"], 18, kinds.get(method, "magnitude")))
                parts.append(
                    text(left + full * record["top1"] + 8, y + 14, f"{100 * record['top1']:.1f} %{budget}", "small")
                )
                y += 24
            y += 12
    note = [measured_on(everything)] if everything else ["Not recorded yet: experiments/paper_tables.py measures it."]
    parts += lines(40, y + 16, note)
    return drawing(980, y + 40, f"{title}, by network and method", parts)


def reuse_records() -> list[dict[str, Any]]:
    """The records of mask reuse: those of the full size if there are any, otherwise the reduced ones."""
    records = recorded_if_any("experiments/results/reuse.json")
    full = [r for r in records if r["kind"] == "full"]
    return sorted(full or records, key=lambda r: (r["network"], r["seed"], r["update_steps"]))


def reuse_figure() -> str:
    """Top-1 after updates of growing size: dense, with the old mask, and with masks that are learned again."""
    records = reuse_records()
    title = f"{name_of(records[0]['network'])} after fine-tuning: top-1 of masks on the new weights"
    left, right, top, bottom = 90.0, 620.0, 80.0, 380.0
    values = [r[arm]["top1"] for r in records for arm in REUSE_ARMS if arm in r and arm != "magnitude"]
    low, high = int(100 * min(values)) - 2, int(100 * max(values)) + 2

    def at(index: int, share: float) -> tuple[float, float]:
        x = left + 30 + (right - left - 60) * index / max(1, len(records) - 1)
        return x, bottom - (bottom - top) * (100 * share - low) / (high - low)

    parts = [text(40, 44, title, "title")]
    for tick in range(low, high + 1, max(1, (high - low) // 5)):
        y = at(0, tick / 100)[1]
        parts += [line(left, y, right, y), text(left - 10, y + 5, f"{tick} %", "small end")]
    for index, record in enumerate(records):
        x = at(index, 0)[0]
        parts.append(text(x, bottom + 24, f"{record['update_steps']:,}", "small middle"))
        parts.append(text(x, bottom + 44, f"{100 * record['relative_change']:.1f} %", "small middle"))
    parts.append(
        text((left + right) / 2, bottom + 68, "steps of fine-tuning, and change of the weights", "small middle")
    )
    y = 100.0
    for arm, name in REUSE_ARMS.items():
        shown = [(i, r[arm]["top1"]) for i, r in enumerate(records) if arm in r and 100 * r[arm]["top1"] >= low]
        kind, dashes = STROKES[arm]
        style = f' stroke-dasharray="{dashes}"' if dashes else ""
        if len(shown) > 1:
            path = " ".join(
                f"{'ML'[n > 0]} {x:.1f} {y_:.1f}" for n, (x, y_) in enumerate(at(*point) for point in shown)
            )
            parts.append(f'<path class="{kind}" d="{path}"{style}/>')
        words = name if shown else f"{name}: below {low} %"
        parts.append(f'<path class="{kind}" d="M {right + 30:g} {y - 5:g} h 34"{style}/>')
        parts.append(text(right + 74, y, words))
        y += 28
    few = records[0]["fresh"]["steps"]
    note = [f"Mask: {records[0]['mask_steps']:,} steps. Relearned and from", f"scratch: {few:,} steps, a tenth."]
    note += [f"{records[0]['test_images']:,} test images."] + (
        ["Reduced size."] if records[0]["kind"] == "reduced" else []
    )
    parts += lines(right + 30, y + 16, note)
    return drawing(980, 480, f"{title}, against the amount of fine-tuning", parts)
