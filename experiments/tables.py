"""Write the tables in README and docs from the recorded results. A test checks that they are up to date.

python experiments/tables.py
"""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = {"cifar_resnet20": "ResNet-20", "cifar_resnet56": "ResNet-56", "resnet50_v1": "ResNet-50"}
ONE_SHOT = {
    "random": "random",
    "magnitude": "magnitude",
    "magnitude_permuted": "magnitude, permuted",
    "wanda": "Wanda",
    "reconstruct": "reconstruct",
    "reconstruct_permuted": "reconstruct, permuted",
}
METHODS = {
    "dense": "dense",
    "magnitude": "magnitude",
    "magnitude_permuted": "magnitude, permuted",
    "paper": "the paper's recipe",
    "halve": "halve",
    "halve_recalibrated": "halve, recalibrated",
}
METRICS = {"top1": "top-1", "agreement": "agreement"}


def one_shot() -> str:
    """One-shot methods: share of magnitude kept, and accuracy without and with recalibration."""
    records = json.loads((ROOT / "experiments/results/one_shot.json").read_text())
    found = {(r["network"], r["data"], r["method"]): r for r in records}
    columns = list(dict.fromkeys((r["network"], r["data"]) for r in records))
    metrics = {data: "agreement" if "500 classes" in data else "top1" for _, data in columns}
    heads = [f"{NAMES[network]}, {data}: {METRICS[metrics[data]]}" for network, data in columns]
    networks = ", ".join(dict.fromkeys(NAMES[network] for network, _ in columns))
    dense = [1.0 if metrics[d] == "agreement" else found[n, d, "magnitude"]["dense_top1"] for n, d in columns]
    lines = [
        f"| %, without / with recalibration | magnitude kept: {networks} | {' | '.join(heads)} |",
        "|---" * (len(heads) + 2) + "|",
        f"| dense | 100 | {' | '.join(f'{100 * value:.1f}' for value in dense)} |",
    ]
    for method, name in ONE_SHOT.items():
        kept = {n: f"{100 * found[n, d, method]['kept_magnitude']:.1f}" for n, d in columns}
        cells = []
        for network, data in columns:
            both = [found.get((network, data, f"{method}{ending}")) for ending in ("", "_recalibrated")]
            cells.append(" / ".join(f"{100 * r[metrics[data]]:.1f}" for r in both if r is not None))
        lines.append(f"| {name} | {', '.join(kept.values())} | {' | '.join(cells)} |")
    counts = dict.fromkeys(f"{NAMES[r['network']]} {r['calibration_images']:,}" for r in records)
    hardware = sorted({f"{r['hardware']} (torch {r['versions']['torch']})" for r in records})
    lines += ["", f"Calibration images: {', '.join(counts)}. Measured on {'; '.join(hardware)}."]
    return "\n".join(lines)


def accuracy() -> str:
    """Accuracy of learned masks: mean over seeds, lowest and highest."""
    records = json.loads((ROOT / "experiments/results/accuracy.json").read_text())
    methods = [method for method in METHODS if any(r["method"] == method for r in records)]
    lines = [f"| % | {' | '.join(METHODS[method] for method in methods)} |", "|---" * (len(methods) + 1) + "|"]
    for network, data, metric in dict.fromkeys((r["network"], r["data"], r["metric"]) for r in records):
        cells = []
        for method in methods:
            row = (network, data, metric, method)
            values = [100 * r["value"] for r in records if (r["network"], r["data"], r["metric"], r["method"]) == row]
            cell = f"{statistics.mean(values):.2f}" if values else ""
            cells.append(cell + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""))
        lines.append(f"| {NAMES[network]}, {data}, {METRICS[metric]} | {' | '.join(cells)} |")
    learned = [r for r in records if r["method"] == "halve"]
    seconds = [r["seconds"] for r in learned]
    where = "; ".join(dict.fromkeys(f"{r['hardware']}, torch {r['versions']['torch']}, {r['date']}" for r in learned))
    lines += [
        "",
        f"{len({r['seed'] for r in learned})} seeds, {min(seconds):.0f} to {max(seconds):.0f} s each: {where}.",
    ]
    return "\n".join(lines)


def learn_gpu() -> str:
    """Time of a learning step on a GPU, compared with its peers."""
    record = json.loads((ROOT / "benchmarks/results/learn_gpu.json").read_text())
    ms = record["median_ms"]
    lines = [
        f"On an {record['hardware']} a learning step of ResNet-50 (batch {record['batch']}, {record['size']} px, bf16) "
        f"takes {ms['halve']:.0f} ms, of",
        f"which sampling is {100 * record['sampling_share']:.0f} %. The same step with dense trainable weights takes "
        f"{ms['dense']:.0f} ms, and through unfold and",
        f"matrix product, as in the paper's code, {ms['unfold']:.0f} ms (`benchmarks/bench_learn.py`, torch "
        f"{record['versions']['torch']}, {record['date']}).",
    ]
    return "\n".join(lines)


SYSTEMS = {
    "eager": "eager",
    "compile": "torch.compile",
    "compile_freezing": "with freezing",
    "best_dense": "best dense",
    "halve_dense": "our kernel, dense",
    "halve": "halve",
}


def gpu() -> str:
    """Whole networks on a GPU: milliseconds per batch, and the speed-up over the best dense form."""
    records = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())
    found = {(r["network"], r["batch"], r["system"]): r.get("median_ms") for r in records}
    lines = [f"| ms per batch | {' | '.join(SYSTEMS.values())} | over best dense |", "|---" * (len(SYSTEMS) + 2) + "|"]
    for network, batch in dict.fromkeys((r["network"], r["batch"]) for r in records):
        times = [found.get((network, batch, system)) for system in SYSTEMS]
        dense, ours = (found.get((network, batch, system)) for system in ("best_dense", "halve"))
        ratio = f"{dense / ours:.2f}x" if dense and ours else ""
        cells = ["" if time is None else f"{time:.3f}" for time in times]
        lines.append(f"| {network.replace('resnet', 'ResNet-')}, batch {batch} | {' | '.join(cells)} | {ratio} |")
    runs = [f"{r['hardware']}, {r['dtype']}, 224 px, torch {r['versions']['torch']}, {r['date']}" for r in records]
    lines += ["", "; ".join(dict.fromkeys(runs)) + "."]
    return "\n".join(lines)


LAYER_BATCHES = (1, 32, 256)


def gpu_layers() -> str:
    """Masked layers on a GPU: microseconds dense, on our kernel with all weights, and with half of them."""
    records = json.loads((ROOT / "benchmarks/results/gpu_layers.json").read_text())
    kinds: dict[tuple[str, str], dict[int, list[dict[str, float]]]] = {}
    names = {(r["network"], r["layer"]): r["shape"].replace(" at 1 x ", " at ") for r in records if r["batch"] == 1}
    for record in records:
        if record["sparse_ms"] is not None:
            kind = record["network"], names[record["network"], record["layer"]]
            kinds.setdefault(kind, {}).setdefault(record["batch"], []).append(record)
    heads = " | ".join(f"batch {batch}" for batch in LAYER_BATCHES)
    lines = [
        f"| library / our kernel dense / sparse, microseconds | layers | {heads} |",
        "|---" * (2 + len(LAYER_BATCHES)) + "|",
    ]
    for (network, shape), found in kinds.items():
        cells = []
        for batch in LAYER_BATCHES:
            if batch not in found:
                cells.append("")
                continue
            times = [
                statistics.mean(1000 * record[kind] for record in found[batch])
                for kind in ("dense_ms", "our_dense_ms", "sparse_ms")
            ]
            words = [f"{time:.1f}" if time < 10 else f"{time:.0f}" for time in times]
            fastest = times.index(min(times))
            words[fastest] = f"**{words[fastest]}**"
            cells.append(" / ".join(words))
        name = f"{network.replace('resnet', 'ResNet-')} {shape}"
        lines.append(f"| {name} | {max(map(len, found.values()))} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {
    name: (ROOT / page, table)
    for name, page, table in [
        ("one_shot", "README.md", one_shot),
        ("accuracy", "README.md", accuracy),
        ("learn_gpu", "README.md", learn_gpu),
        ("gpu", "README.md", gpu),
        ("gpu_layers", "docs/engine.md", gpu_layers),
    ]
}


def written(name: str) -> tuple[Path, str, str]:
    """The file of a table, its current text, and its text with the table up to date."""
    path, table = TABLES[name]
    text = path.read_text()
    begin = f"<!-- {name}: begin (written by experiments/tables.py) -->\n"
    before, _, rest = text.partition(begin)
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not end:
        raise SystemExit(f"{path} has no markers for the table {name}")
    return path, text, f"{before}{begin}{table()}\n{end}{after}"


if __name__ == "__main__":
    for name in TABLES:
        path, old, new = written(name)
        path.write_text(new)
        print(f"{path.relative_to(ROOT)}: {name} {'unchanged' if old == new else 'written'}")
