"""The picture that the demo writes: accuracy as bars, and letters for which masks change the network's answer."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from halve.cli.output import MADE_BY_DEMO

_WIDTH, _LEFT, _RIGHT = 850, 220, 110
_TOP, _ROW = 84, 38
_TILE, _GAP = 44, 6
_LABELS = 30  # height of a line of answers
_STYLE = """
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 15px; fill: #1f2328 }
.title { font-size: 19px; font-weight: 600 } .small { font-size: 13.5px; fill: #59636e } .end { text-anchor: end }
.middle { text-anchor: middle } .bold { font-weight: 600 } .card { fill: #ffffff; stroke: #d0d7de }
.dense { fill: #8c959f } .magnitude { fill: #bf8700 } .learned { fill: #1a7f37 }
.changed { fill: #d1242f; font-weight: 600 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d } .dense { fill: #656c76 }
.magnitude { fill: #d29922 } .learned { fill: #3fb950 } .changed { fill: #f85149 }
}
"""


@dataclass(frozen=True)
class Letter:
    """A test image from 0 to 1, and what each network reads, the dense one first."""

    image: NDArray[np.float32]
    answers: Sequence[str]


def picture(title: str, accuracy: Mapping[str, float], networks: Sequence[str], letters: Sequence[Letter]) -> str:
    """Return the picture as SVG.

    Args:
        title: What is shown.
        accuracy: Shares from 0 to 1, in the order of the bars.
        networks: Names of the networks that read the letters, the dense one first.
        letters: Some test images, with one answer per network.
    """
    parts = [f'<text x="36" y="46" class="title">{escape(title)}</text>']
    for row, (name, share) in enumerate(accuracy.items()):
        y = _TOP + row * _ROW
        length = share * (_WIDTH - _LEFT - _RIGHT)
        kind = next((kind for kind in ("magnitude", "learned") if name.startswith(kind)), "dense")
        parts.append(f'<text x="{_LEFT - 14}" y="{y + 17}" class="end">{escape(name)}</text>')
        parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{length:.1f}" height="24" rx="4"/>')
        parts.append(f'<text x="{_LEFT + length + 8:.1f}" y="{y + 17}" class="bold">{100 * share:.1f} %</text>')
    top = _TOP + len(accuracy) * _ROW + 40
    if letters:
        parts += _read(networks, letters, top)
    height = top + (_TILE + _LABELS * len(networks) + 56 if letters else 0)
    summary = ", ".join(f"{name} {100 * share:.1f} %" for name, share in accuracy.items())
    return "\n".join(
        [
            f"<!-- {MADE_BY_DEMO} -->",
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(f"{title}: {summary}", quote=True)}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="12"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _read(networks: Sequence[str], letters: Sequence[Letter], top: int) -> list[str]:
    """The letters, and below each what the networks read; answers that differ from the dense network's are red."""
    parts = [f'<text x="36" y="{top}" class="small">The first letters for which a mask changes the answer:</text>']
    for row, name in enumerate(networks):
        y = top + 18 + _TILE + _LABELS * (row + 1) - 6
        parts.append(f'<text x="{_LEFT - 14}" y="{y}" class="small end">{escape(name)}</text>')
    for column, one in enumerate(letters):
        x = _LEFT + column * (_TILE + _GAP)
        where = f'x="{x}" y="{top + 18}" width="{_TILE}" height="{_TILE}"'
        parts.append(f'<image {where} image-rendering="pixelated" href="{_png(one.image)}"/>')
        for row, answer in enumerate(one.answers):
            y = top + 18 + _TILE + _LABELS * (row + 1) - 6
            kind = "bold" if answer == one.answers[0] else "changed"
            parts.append(f'<text x="{x + _TILE // 2}" y="{y}" class="middle {kind}">{escape(answer)}</text>')
    return parts


def _png(image: NDArray[np.float32]) -> str:
    """The image as a data URI."""
    buffer = io.BytesIO()
    Image.fromarray((255 * image.clip(0, 1)).astype(np.uint8)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
