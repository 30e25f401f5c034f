"""The plot of a frontier: agreement with the dense network against time."""

from html import escape

from halve.cli.output import MADE_BY_FRONTIER
from halve.learn.frontier import Frontier

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 72, 76, 64
_STYLE = """
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px; fill: #1f2328 }
.title { font-size: 18px; font-weight: 600 } .small { font-size: 13px; fill: #59636e } .end { text-anchor: end }
.middle { text-anchor: middle } .card { fill: #ffffff; stroke: #d0d7de } .grid { stroke: #d0d7de }
.line { fill: none; stroke: #1a7f37; stroke-width: 2 } .dot { fill: #1a7f37 } .dense { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
.line { stroke: #3fb950 } .dot { fill: #3fb950 } .dense { fill: #656c76 }
}
"""


def picture(frontier: Frontier, title: str) -> str:
    """Return the plot as SVG: a dot for each point, and for the network without masks, compiled and dense."""
    plan = frontier.plan
    dots = [
        (point.ms, 100 * point.agreement, f"{point.speedup:.2f} x") for point in frontier if point.agreement is not None
    ]
    dots.append((plan.unmasked_ms, 100.0, "no masks"))
    line = list(dots)
    dots.append((plan.dense_ms, 100.0, "dense"))
    slowest, least = 1.05 * max(ms for ms, _, _ in dots), min(share for _, share, _ in dots)
    fastest = 0.9 * min(ms for ms, _, _ in dots)
    floor = 100 - 1.15 * max(100 - least, 1.0)

    def at(ms: float, share: float) -> tuple[float, float]:
        x = _LEFT + (ms - fastest) / max(slowest - fastest, 1e-9) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (100 - share) / (100 - floor) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [f'<text x="36" y="40" class="title">{escape(title)}</text>']
    for step in range(5):
        share = 100 - step * (100 - floor) / 4
        _, y = at(fastest, share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 5}" class="small end">{share:.1f} %</text>')
        ms = fastest + step * (slowest - fastest) / 4
        x, _ = at(ms, 100)
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 22}" class="small middle">{ms:.3g}</text>')
    where = f"ms per batch of {plan.batch}, {plan.dtype}, {plan.device}"
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 18}" class="small middle">{escape(where)}</text>'
    )
    path = " ".join(f"{x},{y}" for x, y in (at(ms, share) for ms, share, _ in line))
    parts.append(f'<polyline class="line" points="{path}"/>')
    for ms, share, name in dots:
        x, y = at(ms, share)
        kind = "dense" if name == "dense" else "dot"
        parts.append(
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="6"><title>{name}: {share:.1f} %, {ms:.3f} ms</title></circle>'
        )
        below = -12 if name == "dense" else 18  # both may be at the same place
        parts.append(f'<text x="{x + 10}" y="{y + below}">{name}</text>')
    summary = ", ".join(f"{name}: {share:.1f} % at {ms:.3f} ms" for ms, share, name in dots)
    return "\n".join(
        [
            f"<!-- {MADE_BY_FRONTIER} -->",
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" role="img" aria-label="{escape(f"{title}: {summary}", quote=True)}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="12"/>',
            *parts,
            "</svg>",
            "",
        ]
    )
