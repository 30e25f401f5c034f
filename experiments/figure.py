"""The picture in the README, docs/halve.svg, drawn from the recorded results by tables.py.

Plain SVG on a card, so that it is readable in light and dark themes.
"""

import random

from records import METRICS, accuracy_rows, mask_file, name_of, percent, recorded, times

WIDTH, HEIGHT = 1200, 600
STYLE = """
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; font-size: 15px }
.title { font-size: 19px; font-weight: 600 }
.small { font-size: 14px; fill: #59636e }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13.5px }
.bold { font-weight: 600 }
.middle { text-anchor: middle }
.card { fill: #ffffff; stroke: #d0d7de }
.line { stroke: #d0d7de }
.arrow { stroke: #59636e; fill: none; stroke-width: 2 }
.head { fill: #59636e }
.weight { fill: #0969da }
.dropped { fill: none; stroke: #afb8c1; stroke-dasharray: 3 2 }
.file { fill: #f6f8fa; stroke: #8c959f }
.halve { fill: #1a7f37 }
.dense { fill: #8c959f }
.magnitude { fill: #bf8700 }
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
"""
METHODS = {"dense": "dense network", "magnitude": "2:4, largest weights kept", "halve": "2:4, learned by halve"}


def figure() -> str:
    """The picture as SVG."""
    parts = [
        f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="14"/>',
        *_weights(),
        *_files(630),
        *_latency(905),
        f'<line class="line" x1="40" y1="312" x2="{WIDTH - 40}" y2="312"/>',
        *_accuracy(),
    ]
    media = f"@media (prefers-color-scheme: dark) {{{DARK}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="halve learns which two of every four weights to keep, stores the choice beside the '
            f'checkpoint, and compiles the network for sparse kernels">',
            f"<style>{STYLE}{media}\n</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'
        if kind
        else f'<text x="{x:g}" y="{y:g}">{text}</text>'
    )


def _arrow(x: float, y: float, length: float = 40) -> list[str]:
    end = x + length
    return [
        f'<line class="arrow" x1="{x:g}" y1="{y:g}" x2="{end - 8:g}" y2="{y:g}"/>',
        f'<path class="head" d="M {end:g} {y:g} l -11 -6 v 12 z"/>',
    ]


def _weights() -> list[str]:
    """A block of weights, dense and masked. Darker is larger; what is kept is mostly, but not always, the largest."""
    chance = random.Random(5)
    sizes = [[[chance.uniform(0.12, 1) for _ in range(4)] for _ in range(2)] for _ in range(6)]
    parts = [_text(40, 50, "1. Trained weights", "title"), _text(335, 50, "2. Learned 2:4 mask", "title")]
    for row, blocks in enumerate(sizes):
        for block, values in enumerate(blocks):
            kept = sorted(range(4), key=lambda i: values[i] + chance.gauss(0, 0.25))[2:]
            for place, value in enumerate(values):
                x, y = 40 + 26 * (4 * block + place) + 12 * block, 70 + 26 * row
                cell = f'y="{y}" width="22" height="22" rx="4"'
                parts.append(f'<rect class="weight" x="{x}" {cell} fill-opacity="{value:.2f}"/>')
                if place in kept:
                    parts.append(f'<rect class="weight" x="{x + 295}" {cell} fill-opacity="{value:.2f}"/>')
                else:
                    parts.append(f'<rect class="dropped" x="{x + 295.5}" {cell}/>')
    parts += [
        _text(40, 252, "frozen: not one bit of the", "small"),
        _text(40, 272, "checkpoint changes", "small"),
        _text(335, 252, "two of every four input channels,", "small"),
        _text(335, 272, "chosen to match the dense outputs", "small"),
        *_arrow(272, 148),
        *_arrow(567, 148),
    ]
    return parts


def _files(x: float) -> list[str]:
    bits, megabytes = mask_file()
    parts = [_text(x, 50, "3. A file beside it", "title")]
    for y, name, lines in (
        (70, "net.safetensors", ["your checkpoint, unchanged"]),
        (150, "net.masks.safetensors", [f"{bits:.2f} bits per weight:", f"{megabytes:.1f} MB for ResNet-50"]),
    ):
        parts += [
            f'<path class="file" d="M {x} {y} h 16 l 8 8 v 24 h -24 z"/>',
            _text(x + 34, y + 14, name, "code"),
            *(_text(x + 34, y + 34 + 19 * i, line, "small") for i, line in enumerate(lines)),
        ]
    parts += [
        _text(x, 252, "apply it to the next version of", "small"),
        _text(x, 272, "the checkpoint too", "small"),
        *_arrow(x + 222, 148),
    ]
    return parts


def _latency(x: float) -> list[str]:
    network, batch = "resnet50", 256
    ms = times()
    systems = {"torch.compile": "compile_freezing", "folded, dense": "best_dense", "halve": "halve"}
    rows = [
        (name, ms[network, batch, system], "halve" if name == "halve" else "dense")
        for name, system in systems.items()
        if (network, batch, system) in ms
    ]
    longest = max(time for _, time, _ in rows)
    parts = [_text(x, 50, "4. Compiled network", "title")]
    for i, (name, time, kind) in enumerate(rows):
        y = 70 + 54 * i
        parts += [
            _text(x, y + 12, name),
            f'<rect class="{kind}" x="{x}" y="{y + 19}" width="{185 * time / longest:.1f}" height="16" rx="3"/>',
            _text(x + 185 * time / longest + 8, y + 32, f"{time:.2f} ms", "bold" if kind == "halve" else ""),
        ]
    gpu = recorded("benchmarks/results/gpu.json")[0]
    parts += [
        _text(x, 252, f"{name_of(network)}, batch {batch}, {gpu['dtype']},", "small"),
        _text(x, 272, f"{gpu['hardware']}; lower is better", "small"),
    ]
    return parts


def _accuracy() -> list[str]:
    parts = [_text(40, 352, "Accuracy", "title")]
    for i, (method, name) in enumerate(METHODS.items()):
        y = 380 + 28 * i
        parts += [f'<rect class="{method}" x="40" y="{y}" width="16" height="16" rx="3"/>', _text(66, y + 13, name)]
    parts += [
        _text(40, 484, "Learned without labels in about", "small"),
        _text(40, 504, "two minutes per network; every", "small"),
        _text(40, 524, "convolution but the stem is 2:4", "small"),
    ]
    base, full = 530, 160
    for group, row in enumerate(accuracy_rows()):
        network, data, metric = row
        left = 330 + 215 * group
        for i, method in enumerate(METHODS):
            value = percent(row, method)
            x, height = left + 58 * i, full * value / 100
            parts += [
                f'<rect class="{method}" x="{x}" y="{base - height:.1f}" width="48" height="{height:.1f}" rx="3"/>',
                _text(x + 24, base - height - 7, f"{value:.1f}", "middle bold" if method == "halve" else "middle"),
            ]
        words = METRICS[metric]
        images = data.replace("500 ImageNet photos of ", "photos of ")
        parts += [
            _text(left + 82, base + 22, f"{name_of(network)}, {words}, %", "middle"),
            _text(left + 82, base + 42, images, "middle small"),
        ]
    parts.append(f'<line class="line" x1="320" y1="{base + 0.5}" x2="{WIDTH - 40}" y2="{base + 0.5}"/>')
    return parts
