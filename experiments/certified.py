"""The picture in docs/how/certificates.md: share of images that are certified, against the radius."""

from collections.abc import Sequence
from typing import Any

from drawing import drawing
from records import recorded

PANEL, HEIGHT = 480, 360
FEWEST = 4  # images for which a curve is drawn
CURVES = {"halve": "curve", "magnitude": "other"}
PANELS: tuple[tuple[str, str, float, float], ...] = (
    ("digits_region_radius", "Digits: change of each pixel, in 1/255", 255.0, 16.0),
    ("digits_reuse_radius", "Digits: update of weights, in 1/1000 of their RMS", 1000.0, 32.0),
)


def certified_figure() -> str:
    """The picture as SVG."""
    records = {record["run"]: record for record in recorded("experiments/results/certify.json")}
    shown = [(records[run], *panel) for run, *panel in PANELS if records.get(run, {}).get("n", 0) >= FEWEST]
    width = 40 + PANEL * len(shown)
    parts = []
    for place, (record, title, scale, most) in enumerate(shown):
        parts += _panel(60 + PANEL * place, title, record, scale, most)
    label = "Share of images certified and share not flipped by an attack, against the radius"
    return drawing(width, HEIGHT, label, parts)


def _panel(x: float, title: str, record: dict[str, Any], scale: float, most: float) -> list[str]:
    width, top, bottom = 400.0, 70.0, 280.0
    parts = [f'<text x="{x:g}" y="40" class="bold">{title}</text>']
    for share in (0, 0.5, 1):
        y = bottom - (bottom - top) * share
        parts.append(f'<line class="line" x1="{x:g}" y1="{y:g}" x2="{x + width:g}" y2="{y:g}"/>')
        parts.append(f'<text x="{x - 42:g}" y="{y + 5:g}" class="small">{100 * share:.0f} %</text>')
    for tick in range(5):
        at = x + width * tick / 4
        parts.append(f'<text x="{at:g}" y="{bottom + 22:g}" class="small middle">{most * tick / 4:g}</text>')
    found = [one for one in record["per_image"] if one["agree"]]
    lines = (("radius", "halve", "certified"), ("attack_radius", "magnitude", "not flipped by an attack"))
    for row, (key, kind, name) in enumerate(lines):
        radii = sorted(scale * one[key] for one in found if key in one)
        if not radii:
            continue
        parts.append(f'<path class="{CURVES[kind]}" d="{_steps(radii, x, width, most)}"/>')
        parts.append(f'<rect class="{kind}" x="{x + 190 * row:g}" y="318" width="14" height="14" rx="3"/>')
        parts.append(f'<text x="{x + 190 * row + 22:g}" y="330">{name}</text>')
    parts.append(f'<text x="{x + width:g}" y="58" class="small" text-anchor="end">{len(found)} images</text>')
    return parts


def _steps(radii: Sequence[float], x: float, width: float, most: float) -> str:
    """A path: the share of radii that are at least as large."""
    top, bottom, count = 70.0, 280.0, len(radii)
    path = f"M {x:g} {top:g}"
    for index, radius in enumerate(radii, 1):
        at = x + width * min(radius / most, 1.0)
        before, after = (bottom - (bottom - top) * (count - i) / count for i in (index - 1, index))
        path += f" L {at:.1f} {before:.1f} L {at:.1f} {after:.1f}"
        if radius >= most:
            break
    return path
