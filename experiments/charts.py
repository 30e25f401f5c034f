"""Charts of studies: rows of points with their ranges, curves, and rows of shaded cells."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from drawing import drawing, line, lines, rect, text

LINES = {"halve": "curve", "magnitude": "other", "dense": "arrow"}  # strokes of the colours
WIDTH = 980.0
APART = 7.0  # pixels between the kinds of a row
SHORT = 15  # ratio of the ends of a range that powers of ten alone would leave empty


class Point(NamedTuple):
    """The mean of some runs, and the least and the greatest."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Point":
        """
        >>> Point.of([1.0, 2.0, 6.0])
        Point(low=1.0, mean=3.0, high=6.0)
        """
        return cls(min(values), sum(values) / len(values), max(values))


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that enclose two numbers; for a short range also twice and five times these.

    >>> log_ticks(0.004, 2.0), log_ticks(0.006, 0.03)
    ([0.001, 0.01, 0.1, 1.0, 10.0], [0.005, 0.01, 0.02, 0.05])
    """
    factors = (1, 2, 5) if high < SHORT * low else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1
    marks = [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in factors]
    start = max(place for place, mark in enumerate(marks) if mark <= low)
    end = min(place for place, mark in enumerate(marks) if mark >= high and place > start)
    return marks[start : end + 1]


def _log_place(ticks: Sequence[float], start: float, length: float) -> Callable[[float], float]:
    first, last = math.log10(ticks[0]), math.log10(ticks[-1])
    return lambda value: start + length * (math.log10(max(value, ticks[0])) - first) / (last - first)


def _mark(kind: str, x: float, y: float, low: float, high: float, across: bool = True) -> list[str]:
    """A point, and the range of its runs."""
    ends = (low, y, high, y) if across else (x, low, x, high)
    return [line(*ends, LINES[kind]), f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>']


def _legend(x: float, y: float, names: dict[str, str]) -> list[str]:
    parts = []
    for kind, name in names.items():
        parts += [f'<circle class="{kind}" cx="{x:g}" cy="{y - 5:g}" r="5.5"/>', text(x + 14, y, name)]
        x += 50 + 7.6 * len(name)
    return parts


def rows_of_points(
    title: str,
    axis: str,
    rows: Sequence[tuple[str, dict[str, Point]]],
    names: dict[str, str],
    note: Sequence[str],
) -> str:
    """Rows of points on a logarithmic axis, in one colour for each kind; lower values are to the left."""
    left, right, top = 260.0, WIDTH - 60, 110.0
    values = [end for _, points in rows for point in points.values() for end in (point.low, point.high)]
    ticks = log_ticks(min(values), max(values))
    at = _log_place(ticks, left, right - left)
    bottom = top + 32 * len(rows)
    parts = [text(40, 44, title, "title"), *_legend(45, 78, names)]
    for tick in ticks:
        parts += [line(at(tick), top - 8, at(tick), bottom), text(at(tick), bottom + 20, f"{tick:g}", "small middle")]
    parts.append(text((left + right) / 2, bottom + 44, axis, "small middle"))
    for place, (name, points) in enumerate(rows):
        y = top + 32 * place + 12
        parts.append(text(left - 20, y + 5, name, "end"))
        for kind, point in points.items():
            shift = APART * (list(names).index(kind) - (len(names) - 1) / 2)  # points may have the same value
            parts += _mark(kind, at(point.mean), y + shift, at(point.low), at(point.high))
    parts += lines(40, bottom + 74, note)
    return drawing(WIDTH, bottom + 74 + 20 * len(note), f"{title}: {axis}", parts)


class Panel(NamedTuple):
    """One set of axes: curves by kind, as (x, point); an x of 0 stands at the left end of a logarithmic axis."""

    title: str
    x_axis: str
    curves: dict[str, list[tuple[float, Point]]]
    x_names: dict[float, str]
    log: bool = True  # the vertical axis
    form: str = "{:g}"


def panels(title: str, shown: Sequence[Panel], names: dict[str, str], note: Sequence[str]) -> str:
    """Curves, one set of axes beside the other; places on the horizontal axis are equally far apart."""
    parts = [text(40, 44, title, "title"), *_legend(45, 78, names)]
    wide = (WIDTH - 40) / len(shown)
    top = 140.0 if names else 112.0
    bottom = top + 210
    for number, panel in enumerate(shown):
        left, right = 40 + wide * number + 62, 40 + wide * (number + 1) - 34
        values = [end for curve in panel.curves.values() for _, point in curve for end in (point.low, point.high)]
        ticks = log_ticks(min(values), max(values)) if panel.log else linear_ticks(min(values), max(values))
        up = _log_place(ticks, bottom, top - bottom) if panel.log else _linear_place(ticks, bottom, top - bottom)
        places = sorted(panel.x_names)

        def across(x: float, left: float = left, right: float = right, places: list[float] = places) -> float:
            return left + 14 + (right - left - 28) * places.index(x) / max(1, len(places) - 1)

        parts.append(text(left - 50, top - 22, panel.title, "bold"))
        for tick in ticks:
            parts += [
                line(left, up(tick), right, up(tick)),
                text(left - 8, up(tick) + 5, panel.form.format(tick), "small end"),
            ]
        for x, name in panel.x_names.items():
            parts.append(text(across(x), bottom + 22, name, "small middle"))
        parts.append(text((left + right) / 2, bottom + 46, panel.x_axis, "small middle"))
        for kind, curve in panel.curves.items():
            path = " ".join(f"{'ML'[n > 0]} {across(x):.1f} {up(p.mean):.1f}" for n, (x, p) in enumerate(curve))
            parts.append(f'<path class="{LINES[kind]}" d="{path}"/>')
            for x, point in curve:
                parts += _mark(kind, across(x), up(point.mean), up(point.low), up(point.high), across=False)
    parts += lines(40, bottom + 78, note)
    return drawing(WIDTH, bottom + 78 + 20 * len(note), f"{title}: {'; '.join(p.title for p in shown)}", parts)


def linear_ticks(low: float, high: float) -> list[float]:
    """About four round numbers that enclose two numbers.

    >>> linear_ticks(0.13, 0.92)
    [0.0, 0.5, 1.0]
    """
    span = max(high - low, 1e-9)
    power = 10 ** math.floor(math.log10(span / 2))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span / 3)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * place, 12) for place in range(first, max(last, first + 1) + 1)]


def _linear_place(ticks: Sequence[float], start: float, length: float) -> Callable[[float], float]:
    return lambda value: start + length * (value - ticks[0]) / (ticks[-1] - ticks[0])


def cells(
    x: float, y: float, width: float, values: Sequence[float | None], form: str, low: float, high: float
) -> list[str]:
    """A row of cells, the darker the greater on a logarithmic scale from `low` to `high`, with the numbers."""
    parts = []
    for place, value in enumerate(values):
        at = x + place * (width + 4)
        if value is None:
            continue
        share = math.log(max(value, low) / low) / math.log(high / low)
        parts.append(rect(at, y, width, 26, "magnitude", f' opacity="{0.06 + 0.6 * min(share, 1):.2f}"'))
        parts.append(text(at + width / 2, y + 18, form.format(value), "middle"))
    return parts
