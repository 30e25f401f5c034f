"""Charts as inline SVG. Lines stretch with the page, text does not: everything else is placed by percentages.

A figure is read without a script: it has a title, a description and a table. With one, a cursor follows the pointer or
the arrow keys, and a line of text below says what is there.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from halve.markup import text
from halve.text import printable

_TICKS = 5  # at most, about


@dataclass(frozen=True)
class Series:
    """A line, or dots, of one kind.

    Args:
        name: Its name in the legend; none if it is empty.
        kind: A class of the style sheet.
        points: Where it goes through.
        dots: What stands beside each point if these are dots; None for a line.
    """

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    dots: Sequence[str] | None = None


@dataclass(frozen=True)
class Axis:
    """The range of an axis, and how its ticks are written."""

    low: float
    high: float
    unit: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies on the axis, from 0 to 1."""
        low, high, at = (math.log10(v) for v in (self.low, self.high, value)) if self.log else self._plain(value)
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def _plain(self, value: float) -> tuple[float, float, float]:
        return self.low, self.high, value

    def ticks(self) -> list[float]:
        """Round values within the range.

        >>> Axis(0, 1).ticks(), Axis(91.3, 100).ticks(), Axis(0.02, 30, log=True).ticks()
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [92.0, 94.0, 96.0, 98.0, 100.0], [0.1, 1.0, 10.0])
        >>> Axis(0.3, 6, log=True).ticks()
        [0.5, 1.0, 2.0, 5.0]
        """
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            within = [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]
            decades = [tick for tick in within if math.log10(tick).is_integer()]
            return decades if len(decades) > 2 else within
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [round(step * i, 10) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def label(self, value: float) -> str:
        return f"{value:g}{self.unit}"


def axis_of(values: Sequence[float], unit: str = "", *, zero: bool = False, log: bool = False) -> Axis:
    """An axis that shows all of these values; with `zero` it starts there, with some room above the values."""
    low, high = min(values), max(values)
    if log and low > 0:
        return Axis(low / 1.2, high * 1.2, unit, log=True)
    if zero:
        low = min(low, 0.0)
        high += 0.06 * (high - low)
    if high - low < 1e-9 * max(abs(high), 1.0):
        low, high = (0.0 if zero else low - max(abs(low), 1.0) / 2), high + max(abs(high), 1.0) / 2
    return Axis(low, high, unit)


def chart(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    said: Sequence[tuple[float, str]],
    summary: str,
    under: str,
) -> str:
    """Return a chart with its title, legend and readout.

    Args:
        title: What is shown.
        series: The lines.
        x: The horizontal axis.
        y: The vertical axis.
        said: What the readout says, by the position on the horizontal axis, in ascending order.
        summary: The chart in one sentence, for screen readers.
        under: What the horizontal axis is.
    """
    parts = []
    for tick in y.ticks():
        at = f"{100 - 100 * y.share(tick):.2f}%"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick end" x="-8" y="{at}" dy="4">{text(y.label(tick))}</text>')
    for tick in x.ticks():
        share = x.share(tick)
        side = "end" if share > 0.97 else "start" if share < 0.03 else "middle"
        parts.append(f'<text class="tick {side}" x="{100 * share:.2f}%" y="100%" dy="18">{text(x.label(tick))}</text>')
    lines = [one for one in series if one.dots is None]
    if lines:
        paths = "".join(_line(one, x, y) for one in lines)
        parts.append(
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">{paths}</svg>'
        )
    for one in series:
        for (a, b), mark in zip(one.points, one.dots or (), strict=one.dots is not None):
            parts.append(_dot(one.kind, x.share(a), 1 - y.share(b), mark))
    legend = "".join(f'<span class="key {one.kind}">{text(one.name)}</span>' for one in series if one.name)
    drawn = f'<svg class="plot" role="img" aria-label="{text(f"{title}: {summary}")}">{"".join(parts)}</svg>'
    points = [(x.share(at), what, "") for at, what in said]
    return (
        f'<figure class="chart"><figcaption><h3>{text(title)}</h3><span class="legend">{legend}</span></figcaption>'
        f"{followed(f'<div class=frame>{drawn}</div>', title, points, under)}</figure>"
    )


def followed(drawn: str, title: str, points: Sequence[tuple[float, str, str]], under: str = "") -> str:
    """A drawing with a cursor and a readout.

    Args:
        drawn: The drawing, as HTML.
        title: Its name, for screen readers.
        points: Places from 0 to 1 in ascending order, with what the readout says there, and the id of what to go to.
        under: What stands between the two, as text.
    """
    data = {"at": [round(at, 5) for at, _, _ in points], "say": [printable(say) for _, say, _ in points]}
    if any(go for _, _, go in points):
        data["go"] = [go for _, _, go in points]
    below = f'<p class="under">{text(under)}</p>' if under else ""
    last = points[-1][1] if points else ""
    return (
        f'<div class="follow" tabindex="0" role="group" aria-label="{text(title)}, arrow keys read values">{drawn}'
        f'<i class="cursor" aria-hidden="true"></i>{embedded(data)}</div>{below}'
        f'<output class="say" aria-live="polite">{text(last)}</output>'
    )


def embedded(data: object) -> str:
    """JSON for the script, which cannot end the element that it stands in."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    safe = plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json">{safe}</script>'


def _line(one: Series, x: Axis, y: Axis) -> str:
    at = " ".join(f"{1000 * x.share(a):.1f},{1000 - 1000 * y.share(b):.1f}" for a, b in one.points)
    return f'<polyline class="line {escape(one.kind)}" points="{at}" vector-effect="non-scaling-stroke"/>'


def _dot(kind: str, x: float, y: float, mark: str) -> str:
    at, side, shift = f"{100 * y:.2f}%", "end" if x > 0.6 else "start", -11 if x > 0.6 else 11
    return (
        f'<circle class="dot {escape(kind)}" cx="{100 * x:.2f}%" cy="{at}" r="6"/>'
        f'<text class="mark {side}" x="{100 * x:.2f}%" y="{at}" dx="{shift}" dy="4">{text(mark)}</text>'
    )
