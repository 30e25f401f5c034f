"""Plots of the recorded results: accuracy against time, and speed as bars; docs/figures/*.svg."""

import math

from drawing import drawing, line, lines, rect, text
from records import accuracy_rows, measured_on, name_of, percent, recorded, speedups, times

NETWORK, CHECKPOINT, BATCH = "resnet50", "resnet50_v1", 256
DENSE = {"compile_freezing": "torch.compile", "best_dense": "folded, dense"}
POINTS = {
    "magnitude": "largest weights kept",
    "magnitude_permuted": "largest weights, channels permuted",
    "halve": "learned by halve",
}
CPU_SYSTEMS = {"compile_freezing": "torch.compile, freezing", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


def accuracy_against_time() -> str:
    """ResNet-50: predictions that stay the same, against the time of a batch."""
    row = next(row for row in accuracy_rows() if row[0] == CHECKPOINT and row[2] == "agreement")
    ms = times()
    dense = {name: ms[NETWORK, BATCH, system] for system, name in DENSE.items() if (NETWORK, BATCH, system) in ms}
    ours = ms[NETWORK, BATCH, "halve"]
    left, right, top, bottom = 90.0, 700.0, 80.0, 380.0
    most = math.ceil(max(dense.values())) + 1

    def at(time: float, share: float) -> tuple[float, float]:
        return left + (right - left) * time / most, bottom - (bottom - top) * share / 100

    parts = [text(40, 44, f"{name_of(NETWORK)}: predictions that stay the same, against time", "title")]
    for share in range(0, 101, 25):
        y = at(0, share)[1]
        parts += [line(left, y, right, y), text(left - 10, y + 5, f"{share} %", "small end")]
    for time in range(0, most + 1, 2):
        parts.append(text(at(time, 0)[0], bottom + 24, f"{time}", "small middle"))
    parts.append(text((left + right) / 2, bottom + 48, f"milliseconds per batch of {BATCH} images", "small middle"))
    slowest = max(dense.values())
    for name, time in dense.items():
        x, y = at(time, 100)
        place = (x - 8, "") if time == slowest else (x + 8, "end")  # two that are close stay apart
        parts += [f'<circle class="dense" cx="{x:.1f}" cy="{y:.1f}" r="8"/>', text(place[0], y + 28, name, place[1])]
    for method, name in POINTS.items():
        x, y = at(ours, percent(row, method))
        kind = "halve" if method == "halve" else "magnitude"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
        label = f"{name}: {percent(row, method):.0f} %"
        parts.append(text(x - 16, y + 5, label, "end bold") if kind == "halve" else text(x + 16, y + 5, label))
    speed = [r for r in recorded("benchmarks/results/gpu.json") if r["network"] == NETWORK]
    note = ["Gray: the dense network.", "Green and yellow: 2:4 masks, all", "on the same sparse kernels.", ""]
    note += ["Predictions: agreement with", f"the dense network on {row[1].split()[0]}", "ImageNet photos.", ""]
    note += ["Time: float16, 224 px,", *measured_on(speed).split(", ")[:2]]
    parts += lines(right + 40, 100, note)
    label = (
        f"{name_of(NETWORK)}: share of unchanged predictions against milliseconds per batch, dense and with 2:4 masks"
    )
    return drawing(980, 450, label, parts)


def speed_bars() -> str:
    """Whole networks on a GPU: speed relative to the best dense version, one bar for each batch size."""
    ratios = speedups(main=True) | speedups(main=False)
    batches = sorted({batch for _, batch in ratios})
    left, unit, step, y = 190.0, 330.0, 15.0, 104.0
    title, parts = "Speed on a GPU, best dense = 1", list[str]()
    for network in dict.fromkeys(network for network, _ in ratios):
        found = [(batch, ratios[network, batch]) for batch in batches if (network, batch) in ratios]
        parts.append(text(left - 16, y + step * len(found) / 2 + 3, name_of(network), "end"))
        for batch, ratio in found:
            shade = f' fill-opacity="{_shade(batch, batches):.2f}"'
            parts.append(rect(left, y, unit * ratio, step - 3, "halve", shade))
            parts.append(text(left + unit * ratio + 6, y + step - 4, f"{ratio:.2f}x", "small"))
            y += step
        y += 12
    legend, x = list[str](), left
    for batch in batches:
        legend.append(rect(x, 62, 24, step - 3, "halve", f' fill-opacity="{_shade(batch, batches):.2f}"'))
        legend.append(text(x + 32, 73, f"batch {batch}", "small"))
        x += 130
    records = recorded("benchmarks/results/gpu.json")
    note = [f"{measured_on(records)}; {records[0]['dtype']}, 224 px.", "Best dense: the faster of torch.compile with"]
    note[1] += " freezing and the same folded and fused graph on library kernels."
    parts = [text(40, 44, title, "title"), *legend, line(left + unit, 92, left + unit, y, "arrow"), *parts]
    label = f"{title}: {', '.join(dict.fromkeys(name_of(network) for network, _ in ratios))}"
    return drawing(980, y + 60, label, [*parts, *lines(40, y + 20, note)])


def _shade(batch: int, batches: list[int]) -> float:
    """Larger batches are darker."""
    return 0.4 + 0.6 * (batches.index(batch) + 1) / len(batches)


def cpu_bars() -> str:
    """Whole networks on a CPU: time relative to torch.compile."""
    records = recorded("benchmarks/results/cpu.json")
    ms = {(r["network"], r["dtype"], r["batch"], r["system"]): r.get("median_ms") for r in records}
    bars = []
    for network, dtype, batch in dict.fromkeys((r["network"], r["dtype"], r["batch"]) for r in records):
        dense = [ms.get((network, dtype, batch, system)) for system in CPU_SYSTEMS]
        fastest, ours = min(time for time in dense if time), ms.get((network, dtype, batch, "halve"))
        if ours:
            bars.append((f"{name_of(network)}, {dtype}, batch {batch}", [("dense", fastest), ("halve", ours)]))
    names = ", ".join(CPU_SYSTEMS.values())
    note = [f"Gray: the fastest of {names}. Green: halve.", f"{measured_on(records)}; 224 px."]
    return _bars("Time per batch on a CPU, fastest dense = 1", bars, note, "{:.0f} ms")


def _bars(title: str, rows: list[tuple[str, list[tuple[str, float]]]], note: list[str], form: str) -> str:
    """Pairs of bars; the first of each pair has length 1."""
    parts, left, full, y = [text(40, 44, title, "title")], 300.0, 480.0, 72.0
    for name, bars in rows:
        parts.append(text(left - 16, y + 23, name, "end"))
        for i, (kind, time) in enumerate(bars):
            length = full * time / bars[0][1]
            words = form.format(time) + (f", {bars[0][1] / time:.2f}x" if i else "")
            parts.append(rect(left, y + 18 * i, length, 15, kind))
            parts.append(text(left + length + 8, y + 13 + 18 * i, words, "bold" if i else "small"))
        y += 48
    parts += lines(40, y + 16, note)
    return drawing(980, y + 16 + 20 * len(note), f"{title}: " + "; ".join(name for name, _ in rows), parts)
