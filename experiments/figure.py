"""The picture in the README, docs/figures/overview.svg, drawn from the recorded results by tables.py."""

import random

from drawing import arrow, drawing, line, text
from records import METRICS, accuracy_rows, mask_file, name_of, percent, recorded, times

WIDTH, HEIGHT = 1200, 600
METHODS = {"dense": "dense network", "magnitude": "2:4, largest weights kept", "halve": "2:4, learned by halve"}


def figure() -> str:
    """The picture as SVG."""
    parts = [*_weights(), *_files(630), *_latency(905), line(40, 312, WIDTH - 40, 312), *_accuracy()]
    label = (
        "halve learns which two of every four weights to keep, stores the choice beside the checkpoint, and compiles "
        "the network for sparse kernels"
    )
    return drawing(WIDTH, HEIGHT, label, parts)


def _weights() -> list[str]:
    """A block of weights, dense and masked. Darker is larger; what is kept is mostly, but not always, the largest."""
    chance = random.Random(5)
    sizes = [[[chance.uniform(0.12, 1) for _ in range(4)] for _ in range(2)] for _ in range(6)]
    parts = [text(40, 50, "1. Trained weights", "title"), text(335, 50, "2. Learned 2:4 mask", "title")]
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
        text(40, 252, "frozen: not one bit of the", "small"),
        text(40, 272, "checkpoint changes", "small"),
        text(335, 252, "two of every four input channels,", "small"),
        text(335, 272, "chosen to match the dense outputs", "small"),
        *arrow(272, 148),
        *arrow(567, 148),
    ]
    return parts


def _files(x: float) -> list[str]:
    bits, megabytes = mask_file()
    parts = [text(x, 50, "3. A file beside it", "title")]
    for y, name, lines in (
        (70, "net.safetensors", ["your checkpoint, unchanged"]),
        (150, "net.masks.safetensors", [f"{bits:.2f} bits per weight:", f"{megabytes:.1f} MB for ResNet-50"]),
    ):
        parts += [
            f'<path class="file" d="M {x} {y} h 16 l 8 8 v 24 h -24 z"/>',
            text(x + 34, y + 14, name, "code"),
            *(text(x + 34, y + 34 + 19 * i, line, "small") for i, line in enumerate(lines)),
        ]
    parts += [
        text(x, 252, "apply it to the next version of", "small"),
        text(x, 272, "the checkpoint too", "small"),
        *arrow(x + 222, 148),
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
    parts = [text(x, 50, "4. Compiled network", "title")]
    for i, (name, time, kind) in enumerate(rows):
        y = 70 + 54 * i
        parts += [
            text(x, y + 12, name),
            f'<rect class="{kind}" x="{x}" y="{y + 19}" width="{185 * time / longest:.1f}" height="16" rx="3"/>',
            text(x + 185 * time / longest + 8, y + 32, f"{time:.2f} ms", "bold" if kind == "halve" else ""),
        ]
    gpu = recorded("benchmarks/results/gpu.json")[0]
    parts += [
        text(x, 252, f"{name_of(network)}, batch {batch}, {gpu['dtype']},", "small"),
        text(x, 272, f"{gpu['hardware']}; lower is better", "small"),
    ]
    return parts


def _accuracy() -> list[str]:
    parts = [text(40, 352, "Accuracy", "title")]
    for i, (method, name) in enumerate(METHODS.items()):
        y = 380 + 28 * i
        parts += [f'<rect class="{method}" x="40" y="{y}" width="16" height="16" rx="3"/>', text(66, y + 13, name)]
    parts += [
        text(40, 484, "Learned without labels in about", "small"),
        text(40, 504, "two minutes per network; every", "small"),
        text(40, 524, "convolution but the stem is 2:4", "small"),
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
                text(x + 24, base - height - 7, f"{value:.1f}", "middle bold" if method == "halve" else "middle"),
            ]
        words = METRICS[metric]
        images = data.replace("500 ImageNet photos of ", "photos of ")
        parts += [
            text(left + 82, base + 22, f"{name_of(network)}, {words}, %", "middle"),
            text(left + 82, base + 42, images, "middle small"),
        ]
    parts.append(line(320, base + 0.5, WIDTH - 40, base + 0.5))
    return parts
