"""The learning curve: what the log of a run says."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halve.errors import FileError
from halve.learn.reporting import Report
from halve.report import figures as f
from halve.report.chart import Axis, Series, axis_of, chart
from halve.report.files import lines_of, number
from halve.report.tables import Cell, amount, folded

_MOST_POINTS = 400  # of a line: more than there are pixels to tell them apart
_MOST_ROWS = 20  # of the table
_KEYS = ("step", "seconds", "loss", "entropy", "changed")
_WIDE = 30  # a loss that falls by more than this factor is drawn on a logarithmic axis

History = Sequence[Mapping[str, float]]


def history_of(log: Any) -> History:
    """The reports of a run, from its log or as `halve.learn` sends them; what is not finite is left out.

    >>> history_of([{"step": 1, "seconds": 0.5, "loss": 2.0, "entropy": 0.4, "changed": 0.0, "lr": 0.1}])
    [{'step': 1.0, 'seconds': 0.5, 'loss': 2.0, 'entropy': 0.4, 'changed': 0.0}]
    """
    reports = _lines(log) if isinstance(log, str | Path) else log
    found = []
    for report in reports:
        plain = asdict(report) if isinstance(report, Report) else report
        values = {key: number(plain.get(key)) for key in (*_KEYS, "agreement")}
        if all(values[key] is not None for key in _KEYS):
            found.append({key: value for key, value in values.items() if value is not None})
    return sorted(found, key=lambda report: report["step"])


def curve(history: History) -> str:
    """The charts of a run, with their table."""
    points = _thinned(history)
    end = points[-1]["seconds"]
    minutes = end > 180
    scale = 60 if minutes else 1
    start = points[0]["seconds"]
    x = Axis(start / scale, max(end, start + 1e-3) / scale)
    under = f"{'minutes' if minutes else 'seconds'} since the start"
    losses = [point["loss"] for point in points]
    log = min(losses) > 0 and max(losses) / min(losses) > _WIDE
    said = [
        (
            point["seconds"] / scale,
            f"step {point['step']:,.0f}, {f.time(point['seconds'])}: loss {f.small(point['loss'])}, "
            f"entropy {point['entropy']:.2f}, {f.percent(point['changed'])} of blocks changed",
        )
        for point in points
    ]
    times = [point["seconds"] / scale for point in points]

    def line(name: str, kind: str, key: str, factor: float = 1.0) -> Series:
        return Series(name, kind, [(at, factor * point[key]) for at, point in zip(times, points, strict=True)])

    loss = chart(
        "Loss",
        [line("", "sparse", "loss")],
        x,
        axis_of(losses, zero=not log, log=log),
        said=said,
        summary=f"from {f.small(losses[0])} to {f.small(losses[-1])} in {f.count(points[-1]['step'])} steps",
        under=under + (", logarithmic scale" if log else ""),
    )
    shares = [100 * point[key] for point in points for key in ("entropy", "changed")]
    decided = chart(
        "Choices",
        [line("entropy", "accent", "entropy", 100), line("blocks changed", "sparse", "changed", 100)],
        x,
        axis_of([*shares, 0.0], " %", zero=True),
        said=said,
        summary=f"entropy from {points[0]['entropy']:.2f} to {points[-1]['entropy']:.2f}, "
        f"{f.percent(points[-1]['changed'])} of blocks changed",
        under=under,
    )
    charts = loss + decided + _agreement([point for point in history if "agreement" in point], x, scale, under)
    return f'<div class="charts">{charts}</div>' + _table(points, len(history))


def _agreement(points: History, x: Axis, scale: float, under: str) -> str:
    """How far the masks agreed with the dense network while they were learned; nothing if that was not measured."""
    if not points:
        return ""
    points = points[:: -(-len(points) // _MOST_POINTS)]
    shares = [100 * point["agreement"] for point in points]
    at = [(point["seconds"] / scale, share) for point, share in zip(points, shares, strict=True)]
    said = [
        (place, f"step {point['step']:,.0f}, {f.time(point['seconds'])}: {f.percent(point['agreement'])}")
        for (place, _), point in zip(at, points, strict=True)
    ]
    return chart(
        "Agreement on held-back images",
        [Series("", "sparse", at), Series("", "sparse", at, [""] * len(at))],
        x,
        axis_of([min(shares) - 0.1 * max(100 - min(shares), 1.0), 100.0], " %"),
        said=said,
        summary=f"from {f.percent(points[0]['agreement'])} to {f.percent(points[-1]['agreement'])}",
        under=f"{under}; on some of the images that the verdict is about",
    )


def _table(points: History, reports: int) -> str:
    every = max(1, -(-len(points) // _MOST_ROWS))
    chosen = [*points[:-1:every], points[-1]]
    means = "" if len(points) == reports else f"; each is the mean of up to {-(-reports // _MOST_POINTS)} reports"
    rows: list[list[Cell]] = [
        [
            amount(f.count(point["step"]), point["step"]),
            amount(f.time(point["seconds"]), point["seconds"]),
            amount(f.small(point["loss"]), point["loss"]),
            amount(f"{point['entropy']:.3f}", point["entropy"]),
            amount(f.percent(point["changed"]), point["changed"]),
        ]
        for point in chosen
    ]
    title = f"Values of {len(chosen)} of {reports:,} reports{means}"
    return folded(title, (">step", ">time", ">loss", ">entropy", ">blocks changed"), rows)


def _thinned(history: History) -> History:
    """Means over as many reports as give no more points than can be seen; the last one stays as it is."""
    size = -(-len(history) // _MOST_POINTS)
    if size <= 1:
        return history
    groups = [history[start : start + size] for start in range(0, len(history) - 1, size)]
    means = [{key: sum(point[key] for point in group) / len(group) for key in _KEYS} for group in groups]
    return [*means, history[-1]]


def _lines(path: str | Path) -> list[dict[str, Any]]:
    found, lines = [], lines_of(path)
    for count, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            if 1 < count == len(lines):  # a run that was killed while it wrote
                break
            raise FileError(f"{path} is not a log of 'halve learn': line {count} is not valid JSON") from error
        if not isinstance(values, dict) or not values.keys() >= set(_KEYS):
            raise FileError(
                f"{path} is not a log of 'halve learn': line {count} lacks some of the keys {', '.join(_KEYS)}"
            )
        found.append(values)
    return found
