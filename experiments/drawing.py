"""SVG for README and site: shapes on a card, readable in light and dark themes."""

from collections.abc import Iterable
from html import escape

STYLE = """
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; font-size: 15px }
.title { font-size: 19px; font-weight: 600 }
.small { font-size: 14px; fill: #59636e }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13.5px }
.bold { font-weight: 600 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.card { fill: #ffffff; stroke: #d0d7de }
.line { stroke: #d0d7de; fill: none }
.arrow { stroke: #59636e; fill: none; stroke-width: 2 }
.head { fill: #59636e }
.weight { fill: #0969da }
.dropped { fill: none; stroke: #afb8c1; stroke-dasharray: 3 2 }
.file { fill: #f6f8fa; stroke: #8c959f }
.halve { fill: #1a7f37 }
.dense { fill: #8c959f }
.magnitude { fill: #bf8700 }
.curve { stroke: #1a7f37; fill: none; stroke-width: 3 }
.other { stroke: #bf8700; fill: none; stroke-width: 3 }
"""
DARK = """
text { fill: #e6edf3 }
.small { fill: #9198a1 }
.card { fill: #0d1117; stroke: #3d444d }
.line { stroke: #3d444d }
.arrow { stroke: #9198a1 }
.head { fill: #9198a1 }
.weight { fill: #4493f8 }
.dropped { stroke: #656c76 }
.file { fill: #151b23; stroke: #656c76 }
.halve { fill: #3fb950 }
.dense { fill: #656c76 }
.magnitude { fill: #d29922 }
.curve { stroke: #3fb950 }
.other { stroke: #d29922 }
"""


def drawing(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """A picture on a card, with what it shows in words."""
    media = f"@media (prefers-color-scheme: dark) {{{DARK}}}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}">'
    )
    card = f'<rect class="card" x="1" y="1" width="{width - 2:g}" height="{height - 2:g}" rx="14"/>'
    return "\n".join([head, f"<style>{STYLE}{media}\n</style>", card, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text."""
    shown = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{shown}>{escape(words, quote=False)}</text>'


def lines(x: float, y: float, words: Iterable[str], kind: str = "small", step: float = 20) -> list[str]:
    """Several lines of text, below each other."""
    return [text(x, y + step * i, line, kind) for i, line in enumerate(words)]


def rect(x: float, y: float, width: float, height: float, kind: str, more: str = "") -> str:
    """A rectangle with round corners."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"{more}/>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> str:
    return f'<line class="{kind}" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"/>'


def arrow(x: float, y: float, length: float = 40) -> list[str]:
    """An arrow to the right."""
    end = x + length
    return [line(x, y, end - 8, y, "arrow"), f'<path class="head" d="M {end:g} {y:g} l -11 -6 v 12 z"/>']


def arrow_down(x: float, y: float, length: float = 30) -> list[str]:
    """An arrow downwards."""
    end = y + length
    return [line(x, y, x, end - 8, "arrow"), f'<path class="head" d="M {x:g} {end:g} l -6 -11 h 12 z"/>']


def box(x: float, y: float, width: float, title: str, words: Iterable[str], height: float = 96) -> list[str]:
    """A step: a box with a title and a few lines."""
    inside = [text(x + 14, y + 28, title, "bold"), *lines(x + 14, y + 52, words)]
    return [rect(x, y, width, height, "file"), *inside]
