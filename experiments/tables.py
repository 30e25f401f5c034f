"""Write every published number and table from the recorded results. A test checks that they are up to date.

python experiments/tables.py
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import budget_results
import certificate_tables
import export_tables
import gpu_speed
import open_results
import sketches
import tasks
from certified import certified_figure
from figure import figure
from idea import idea
from page_text import prose, table
from plots import accuracy_against_time, cpu_bars, speed_bars
from records import (
    METHODS,
    METRICS,
    ROOT,
    accuracies,
    accuracy_rows,
    is_main,
    learned,
    mask_file,
    measured_on,
    name_of,
    percent,
    percents,
    recorded,
    recorded_if_any,
    span,
)
from studies import (
    PAPER_METHODS,
    REUSE_ARMS,
    epochs_to_converge,
    longest,
    paper_figure,
    paper_records,
    reuse_figure,
    reuse_records,
)

ONE_SHOT = {
    "random": "random",
    "magnitude": "magnitude",
    "magnitude_permuted": "magnitude, permuted",
    "wanda": "Wanda",
    "reconstruct": "reconstruct",
    "reconstruct_permuted": "reconstruct, permuted",
}
CPU_SYSTEMS = {
    "eager": "eager",
    "channels_last": "channels last",
    "compile_freezing": "torch.compile, freezing",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "halve": "halve",
}


def headline() -> str:
    """Four numbers with their conditions."""
    cifar = ("cifar_resnet20", "CIFAR-10 test", "top1")
    photos = next(row for row in accuracy_rows() if row[2] == "agreement")
    minutes = statistics.mean(r["seconds"] for r in learned(cifar[0])) / 60
    bits, megabytes = mask_file()
    items = [
        f"- **{percent(cifar, 'halve'):.1f} % top-1** for a 2:4 ResNet-20 on CIFAR-10, where the dense network has "
        f"{percent(cifar, 'dense'):.1f} %. The mask was learned in {minutes:.0f} minutes on one GPU, without labels. "
        f"Keeping the largest weights gives {percent(cifar, 'magnitude'):.1f} %.",
        f"- **{percent(photos, 'halve'):.0f} % of predictions unchanged** in a 2:4 {name_of(photos[0])}, on "
        f"{photos[1]}. Keeping the largest weights leaves {percent(photos, 'magnitude'):.0f} % unchanged.",
        gpu_speed.headline(),
        f"- **{bits:.2f} bits per weight** for the mask file: {megabytes:.1f} MB for ResNet-50.",
    ]
    return "\n".join(map(prose, items))


def accuracy_brief() -> str:
    """Learned masks in the README: mean over seeds."""
    methods = ("dense", "magnitude", "halve")
    rows = [
        [f"{name_of(row[0])}, {row[1]}, {METRICS[row[2]]}", *(f"{percent(row, method):.1f}" for method in methods)]
        for row in accuracy_rows()
        if all(percents(row, method) for method in methods)
    ]
    minutes = span([r["seconds"] / 60 for r in learned()], "{:.1f}")
    note = f"Mean of {len({r['seed'] for r in learned()})} seeds, {minutes} minutes each on an NVIDIA H200."
    return f"{table(['%', *(METHODS[method] for method in methods)], rows)}\n\n{note}"


def accuracy() -> str:
    """Accuracy of learned masks: mean over seeds, lowest and highest."""
    methods = [method for method in METHODS if any(r["method"] == method for r in accuracies())]
    rows = []
    for row in accuracy_rows():
        cells = []
        for method in methods:
            values = percents(row, method)
            cell = f"{statistics.mean(values):.2f}" if values else ""
            cells.append(cell + (f" ({span(values)})" if len(values) > 1 else ""))
        rows.append([f"{name_of(row[0])}, {row[1]}, {METRICS[row[2]]}", *cells])
    return table(["%", *(METHODS[method] for method in methods)], rows)


def runs() -> str:
    """How the learned masks of the table were made."""
    rows = []
    for network in dict.fromkeys(r["network"] for r in learned()):
        found = learned(network)
        settings = found[0]["settings"]
        rows.append(
            [
                name_of(network),
                span([r["seconds"] for r in found], "{:.0f}") + " s",
                span([r["settings"]["steps_done"] for r in found], "{:,}"),
                f"{settings['batch']} images of {settings['size']} px",
                measured_on(found),
            ]
        )
    return table(["network", "time", "steps", "batch", "measured on"], rows)


def plans() -> str:
    """What masks were learned for a plan, and what it says of their speed. Nothing if there are none."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in accuracies():
        if "plan" in record:
            found.setdefault((record["network"], record["method"]), []).append(record)
    rows = []
    for (network, method), records in found.items():
        settings = records[0]["settings"]
        times = ([r[key] for r in records] for key in ("dense_ms", "unmasked_ms", "ms"))
        measured = dict.fromkeys(f"{', '.join(r['plan'].split(', ')[:3])}, {r['date']}" for r in records)
        rows.append(
            [
                f"{name_of(network)}, {METHODS[method].removeprefix('halve, ')}",
                span([100 * r["masked_share"] for r in records], "{:.0f}"),
                *map(span, times),
                span([r["dense_ms"] / r["ms"] for r in records]) + "x",
                span([r["settings"]["steps_done"] for r in records], "{:,}"),
                f"{span([r['seconds'] for r in records], '{:.0f}')} s",
                f"{settings['batch']} images of {settings['size']} px",
                "; ".join(measured),
            ]
        )
    heads = ["", "weights masked, %", "dense, ms", "compiled without masks", "with these masks", "over dense"]
    return table([*heads, "steps", "time", "batch", "plan"], rows) if rows else ""


def accuracy_cpu() -> str:
    """Learned masks on a CPU: mean over seeds, lowest and highest. Nothing if none were learned on one."""
    runs: dict[tuple[str, str, str, float | None], list[dict[str, Any]]] = {}
    methods = [method for method in METHODS if method not in ("dense", "magnitude", "magnitude_permuted")]
    for record in sorted(accuracies("cpu"), key=lambda r: list(METHODS).index(r["method"])):
        if record["method"] in methods and record["metric"] == "top1":
            key = (record["network"], record["data"], record["method"], record["settings"]["minutes"])
            runs.setdefault(key, []).append(record)
    rows = []
    for (network, data, method, minutes), found in sorted(runs.items(), key=lambda item: item[0][:2]):
        row, values = (network, data, "top1"), [100 * r["value"] for r in found]
        dense = percents(row, "dense", "cpu") or percents(row, "dense")
        rows.append(
            [
                f"{name_of(network)}, {data}",
                METHODS[method],
                f"{minutes:g}" if minutes else "",
                span([r["settings"]["steps_done"] for r in found], "{:,}"),
                f"{statistics.mean(values):.2f}" + (f" ({span(values)})" if len(values) > 1 else ""),
                f"{statistics.mean(dense):.2f}" if dense else "",
                measured_on(found),
            ]
        )
    heads = ["", "method", "minutes", "steps", "top-1 of learned masks, %", "dense top-1, %", "measured on"]
    return table(heads, rows) if rows else ""


def processes() -> str:
    """Masks learned by two processes beside one. Nothing if none were learned so."""
    records = recorded_if_any("experiments/results/processes.json")
    rows = []
    for count in (1, 2):
        runs = [r for r in records if r["processes"] == count and "seconds" in r]
        if not runs:
            return ""
        scores = [key for key in runs[0] if key.startswith(("kl_", "agreement_"))]
        spans = [
            f"{statistics.mean(values):.3f} ({span(values, '{:.3f}')})"
            for values in ([r[key] for r in runs] for key in scores)
        ]
        rows.append([f"{count}", f"{len(runs)}", *spans, f"{span([r['seconds'] for r in runs], '{:.0f}')} s"])
    heads = [score.replace("kl_", "KL, ").replace("agreement_", "agreement, ") for score in scores]
    first, killed = records[0], [r for r in records if "resumed_from" in r]
    words = (
        f"{name_of(first['network'])}, {first['steps']} steps of {first['images']} images of {first['size']} px, on "
        f"{first['threads']} threads in all; mean, lowest and highest of all seeds, on classes that are held back. "
        f"{measured_on(records)} (`experiments/processes.py`)."
    )
    same = "bit for bit the same" if all(r["same_masks"] for r in records) else "not the same"
    words += f" The masks of both processes are {same}"
    if killed:
        words += f", also after one of them was killed halfway and both went on from step {killed[0]['resumed_from']}"
    return f"{table(['processes', 'seeds', *heads, 'time'], rows)}\n\n{prose(words + '.')}"


def one_shot() -> str:
    """One-shot methods: share of magnitude kept, and accuracy without and with recalibration."""
    records = recorded("experiments/results/one_shot.json")
    found = {(r["network"], r["data"], r["method"]): r for r in records}
    columns = list(dict.fromkeys((r["network"], r["data"]) for r in records))
    metrics = {data: "agreement" if "500 classes" in data else "top1" for _, data in columns}
    heads = [f"{name_of(network)}, {data}: {METRICS[metrics[data]]}" for network, data in columns]
    networks = ", ".join(dict.fromkeys(name_of(network) for network, _ in columns))
    dense = [1.0 if metrics[d] == "agreement" else found[n, d, "magnitude"]["dense_top1"] for n, d in columns]
    rows = [["dense", "100", *(f"{100 * value:.1f}" for value in dense)]]
    for method, name in ONE_SHOT.items():
        kept = {n: f"{100 * found[n, d, method]['kept_magnitude']:.1f}" for n, d in columns}
        cells = []
        for network, data in columns:
            both = [found.get((network, data, f"{method}{ending}")) for ending in ("", "_recalibrated")]
            cells.append(" / ".join(f"{100 * r[metrics[data]]:.1f}" for r in both if r is not None))
        rows.append([name, ", ".join(kept.values()), *cells])
    counts = dict.fromkeys(f"{name_of(r['network'])} {r['calibration_images']:,}" for r in records)
    hardware = sorted({f"{r['hardware']} (torch {r['versions']['torch']})" for r in records})
    note = f"Calibration images: {', '.join(counts)}. Measured on {'; '.join(hardware)}."
    heads = ["%, without / with recalibration", f"magnitude kept: {networks}", *heads]
    return f"{table(heads, rows)}\n\n{note}"


def learn_gpu() -> str:
    """Time of a learning step on a GPU, compared with others."""
    record = recorded("benchmarks/results/learn_gpu.json")
    ms = record["median_ms"]
    rows = [
        ["`halve.learn`, the default step", f"{ms['halve']:.0f} ms"],
        ["the same with dense trainable weights", f"{ms['dense']:.0f} ms"],
        ["unfold and matrix product, as in the paper's code", f"{ms['unfold']:.0f} ms"],
    ]
    note = (
        f"ResNet-50, batch {record['batch']}, {record['size']} px, {record['precision']}; sampling is "
        f"{100 * record['sampling_share']:.0f} % of our step ({measured_on([record])}; `benchmarks/bench_learn.py`)."
    )
    return f"{table(['one training step', 'time'], rows)}\n\n{note}"


def cpu() -> str:
    """Whole networks on a CPU: milliseconds per batch, and the speed-up over torch.compile."""
    records, rows = recorded("benchmarks/results/cpu.json"), []
    ms = {(r["network"], r["dtype"], r["batch"], r["system"]): r.get("median_ms") for r in records}
    systems = {system: name for system, name in CPU_SYSTEMS.items() if any(key[3] == system for key in ms)}
    for network, dtype, batch in dict.fromkeys((r["network"], r["dtype"], r["batch"]) for r in records):
        found = {system: ms.get((network, dtype, batch, system)) for system in systems}
        dense, ours = found["compile_freezing"], found["halve"]
        ratio = f"{dense / ours:.2f}x" if dense and ours else ""
        cells = ["" if time is None else f"{time:.1f}" for time in found.values()]
        rows.append([f"{name_of(network)}, {dtype}, batch {batch}", *cells, ratio])
    note = f"{measured_on(records)}; 224 px (`benchmarks/bench_cpu.py`)."
    return f"{table(['ms per batch', *systems.values(), 'over torch.compile'], rows)}\n\n{note}"


def cpu_brief() -> str:
    """What the README says about CPUs."""
    records = [r for r in recorded("benchmarks/results/cpu.json") if r["dtype"] == "float32"]
    ms = {(r["network"], r["batch"], r["system"]): r.get("median_ms") for r in records}
    rows: list[list[str]] = []
    others: dict[int, dict[str, float]] = {}  # by batch size
    for network, batch in dict.fromkeys((r["network"], r["batch"]) for r in records):
        eager, compiled, ours = (ms.get((network, batch, name)) for name in ("eager", "compile_freezing", "halve"))
        if compiled and ours and not is_main(network):
            others.setdefault(batch, {})[name_of(network)] = compiled / ours
        elif eager and compiled and ours:
            times = [f"{time:.1f}" for time in (eager, compiled, ours)]
            rows.append([f"{name_of(network)}, batch {batch}", *times, f"{compiled / ours:.2f}x"])
    heads = ["ms per batch, on a CPU", "eager", "torch.compile, freezing", "halve", "over torch.compile"]
    note = f"{measured_on(records)}; float32, 224 px."
    for batch, ratios in sorted(others.items()):
        slowest = min(ratios, key=ratios.__getitem__)
        note += f" {len(ratios)} other networks at batch {batch}: {span(ratios.values())}x, the least on {slowest}."
    return f"{table(heads, rows)}\n\n{prose(note)}"


def pool() -> str:
    """Max pooling, which best dense uses too."""
    records = recorded("benchmarks/results/pool.json")
    ms = {(r["batch"], r["system"]): 1000 * r["median_ms"] for r in records}
    rows = [
        [f"batch {batch}", f"{ms[batch, 'torch']:.0f}", f"{ms[batch, 'halve']:.0f}"]
        for batch in dict.fromkeys(r["batch"] for r in records)
    ]
    return (
        f"{table(['microseconds', 'PyTorch', 'halve'], rows)}\n\n{measured_on(records)} (`benchmarks/bench_pool.py`)."
    )


def photos() -> str:
    """How often half precision changes a prediction."""
    records = recorded("benchmarks/results/photos.json")
    names = {
        "torch": "PyTorch",
        "torch, BatchNorm folded": "PyTorch, BatchNorm folded first",
        "halve": "halve, planned kernels",
        "halve, all sparse": "halve, all masked layers sparse",
    }
    flips = {(r["system"], r["dtype"]): r["flips"] for r in records}
    dtypes = list(dict.fromkeys(r["dtype"] for r in records))
    rows = [
        [name, *(f"{flips[system, dtype]:,}" if (system, dtype) in flips else "-" for dtype in dtypes)]
        for system, name in names.items()
        if any((system, dtype) in flips for dtype in dtypes)
    ]
    count = records[0]["photos"]
    note = f"{measured_on(records)} (`benchmarks/bench_photos.py`)."
    peer = "torch, BatchNorm folded"
    compared = [
        f"{flips['halve', dtype] - flips[peer, dtype]:+} in {dtype} (two standard errors: "
        f"{2 * math.sqrt(flips['halve', dtype] + flips[peer, dtype]):.0f})"
        for dtype in dtypes
        if flips.keys() >= {("halve", dtype), (peer, dtype)}
    ]
    if compared:
        note = prose(f"{note} halve against PyTorch with BatchNorm folded: {', '.join(compared)}.")
    return f"{table([f'changed predictions of {count:,}', *dtypes], rows)}\n\n{note}"


def resnet50_learned() -> str:
    """How the recorded masks of the ResNet-50 tutorial were learned."""
    found = learned("resnet50_v1")
    steps = span([r["settings"]["steps_done"] for r in found], "{:,}")
    settings = found[0]["settings"]
    return prose(
        f"Recorded: {len(found)} runs, {span([r['seconds'] for r in found], '{:.0f}')} seconds each, {steps} steps of "
        f"{settings['batch']} photos at {settings['size']} px ({measured_on(found)})."
    )


def resnet50_accuracy() -> str:
    """What the masks of the ResNet-50 tutorial change."""
    methods = ("dense", "magnitude", "magnitude_permuted", "halve")
    rows = [
        [f"{METRICS[row[2]]}, {row[1]}", *(f"{percent(row, method):.1f}" for method in methods)]
        for row in accuracy_rows()
        if row[0] == "resnet50_v1"
    ]
    return table(["%", *(METHODS[method] for method in methods)], rows)


def fuzz() -> str:
    """How many damaged files were tried."""
    found = recorded("benchmarks/results/fuzz_files.json")
    failures = sum(len(part["failures"]) for part in found.values())
    return prose(
        f"Of {found['files']['cases']:,} files and {found['networks']['cases']:,} compiled networks, damaged at random "
        f"or edited by someone who knows the format, {failures} crashed, hung, or were read as something that they are "
        f"not."
    )


def peers() -> str:
    """Other tools on the CIFAR-10 checkpoints, and ours beside them."""
    records, rows = recorded("experiments/results/peers.json"), []
    one_shot = {(r["network"], r["method"]): 100 * r["top1"] for r in recorded("experiments/results/one_shot.json")}
    for network in dict.fromkeys(r["network"] for r in records):
        row = (network, "CIFAR-10 test", "top1")
        rows.append([name_of(network), "dense", f"{percent(row, 'dense'):.1f}", "", ""])
        for record in records:
            if record["network"] == network:
                tool = f"{record['tool']} {record['versions']['modelopt']}, `{record['mode']}`"
                along = f"{record['along_input_channels']} of {record['masked_layers']}"
                changed = "yes" if record["kept_weights_changed"] else "no"
                rows.append([name_of(network), tool, f"{100 * record['top1']:.1f}", along, changed])
        for name, top1 in (
            ("`prune`, reconstruct, permuted", one_shot[network, "reconstruct_permuted"]),
            ("`learn`", percent(row, "halve")),
        ):
            rows.append([name_of(network), f"halve {name}", f"{top1:.1f}", "all", "no"])
    heads = ["network", "tool", "top-1, %", "layers that are 2:4 along input channels", "kept weights changed"]
    note = prose(
        f"CIFAR-10 test set, no retraining. `sparsegpt` was calibrated on "
        f"{max(r['calibration_images'] for r in records):,} training images. {measured_on(records)} "
        f"(`experiments/peers.py`). Ours are from [accuracy](results/accuracy.md); that all masked layers are 2:4 "
        f"along input channels and kept weights do not change is what `verify` checks."
    )
    return f"{table(heads, rows)}\n\n{note}"


def loaders() -> str:
    """Images per second of the loaders."""
    records = recorded("benchmarks/results/loader.json")
    rows = [
        [
            "Pillow" if r["loader"] == "pillow" else f"DALI, on a {'GPU' if r['device'] == 'cuda' else 'CPU'}",
            str(r["threads"]),
            f"{r['images_per_s']:.0f}",
            "" if r["cpu_ms_per_image"] is None else f"{r['cpu_ms_per_image']:.1f} ms",
            f"{r['largest_difference']:.0f} of 255",
        ]
        for r in records
    ]
    heads = ["loader", "workers", "images per second", "CPU time per image", "largest difference of a pixel"]
    note = f"{records[0]['data']}; {measured_on(records)} (`benchmarks/bench_loader.py`)."
    return f"{table(heads, rows)}\n\n{prose(note)}"


def _shares(record: dict[str, Any] | None) -> str:
    """Top-1 and top-5 in percent; top-5 is not known of fewer than six classes."""
    if record is None:
        return ""
    return " / ".join(f"{100 * record[key]:.2f}" for key in ("top1", "top5") if record[key] is not None)


def paper_tables() -> str:
    """The paper's tables: top-1 and top-5 of each method, and epochs to converge."""
    parts = []
    for data, networks in paper_records().items():
        methods = [m for m in PAPER_METHODS if any(longest(records, m) for records in networks.values())]
        rows = [
            [name_of(network), *(_shares(longest(records, method)) for method in methods)]
            for network, records in networks.items()
        ]
        everything = [r for records in networks.values() for r in records]
        budgets = [
            [name_of(network), str(records[0]["dense"]["epochs"])]
            + [str(epochs_to_converge(records, m) or "not") for m in methods if m in ("paper", "paper_tuned", "halve")]
            + [", ".join(str(e) for e in sorted({r["epochs"] for r in records if r["epochs"]}))]
            for network, records in networks.items()
        ]
        learned_by = [PAPER_METHODS[m] for m in methods if m in ("paper", "paper_tuned", "halve")]
        weights = ", ".join(sorted({r["dense"]["weights"] for r in everything}))
        about = f"{data}. Top-1 / top-5 in %, learned masks with their largest budget. Dense networks: {weights}."
        parts += [
            table(["%", *(PAPER_METHODS[m] for m in methods)], rows),
            prose(f"{about} {measured_on(everything)}."),
        ]
        heads = ["epochs", "of the dense network", *learned_by, "budgets tried"]
        parts += ["Epochs to come within a point of the dense network's top-1:", table(heads, budgets)]
    if not parts:
        return "No results are recorded yet; the command below records them."
    return "\n\n".join(parts)


def reuse() -> str:
    """Masks after updates of the checkpoint."""
    records = reuse_records()
    arms = [arm for arm in REUSE_ARMS if all(arm in r for r in records)]
    rows = [
        [f"{r['update_steps']:,}", f"{100 * r['relative_change']:.1f} %"]
        + [" / ".join(f"{100 * r[arm][key]:.1f}" for key in ("top1", "agreement") if key in r[arm]) for arm in arms]
        for r in records
    ]
    heads = ["steps of fine-tuning", "change of the weights", *(REUSE_ARMS[arm] for arm in arms)]
    first = records[0]
    changed = [
        f"{REUSE_ARMS[arm]} {span([100 * r[arm]['changed_blocks'] for r in records], '{:.1f}')} %"
        for arm in arms
        if "changed_blocks" in first[arm]
    ]
    size = "Reduced size, one seed: differences below a point mean nothing. " if first["kind"] == "reduced" else ""
    note = (
        f"{name_of(first['network'])}, CIFAR-10: top-1 / agreement with the updated dense network, in %, on "
        f"{first['test_images']:,} test images. {size}"
        f"The mask was learned in {first['mask_steps']:,} steps of {first['batch']} images, the others in "
        f"{first['fresh']['steps']:,}. "
        f"Blocks that changed: {'; '.join(changed)}. {measured_on(records)} (`experiments/reuse.py`)."
    )
    return f"{table(heads, rows)}\n\n{prose(note)}"


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    name: (ROOT / page, made)
    for page, name, made in [
        ("README.md", "headline", headline),
        ("README.md", "accuracy_brief", accuracy_brief),
        ("README.md", "speed_brief", gpu_speed.speed_brief),
        ("README.md", "cpu_brief", cpu_brief),
        ("README.md", "speed_limit", gpu_speed.speed_limit),
        ("README.md", "export_brief", export_tables.export_brief),
        ("docs/results/accuracy.md", "accuracy", accuracy),
        ("docs/results/accuracy.md", "runs", runs),
        ("docs/results/accuracy.md", "plans", plans),
        ("docs/results/accuracy.md", "accuracy_cpu", accuracy_cpu),
        ("docs/results/accuracy.md", "budgets", budget_results.budgets),
        ("docs/results/accuracy.md", "processes", processes),
        ("docs/results/accuracy.md", "one_shot", one_shot),
        ("docs/results/accuracy.md", "learn_gpu", learn_gpu),
        ("docs/results/speed.md", "gpu_summary", gpu_speed.gpu_summary),
        ("docs/results/speed.md", "gpu", gpu_speed.gpu),
        ("docs/results/speed.md", "cpu", cpu),
        ("docs/results/speed.md", "gpu_split", gpu_speed.gpu_split),
        ("docs/results/speed.md", "gpu_sparsity", gpu_speed.gpu_sparsity),
        ("docs/results/speed.md", "gpu_layers", gpu_speed.gpu_layers),
        ("docs/results/speed.md", "conv3x3", gpu_speed.conv3x3),
        ("docs/results/speed.md", "conv3x3_planned", gpu_speed.conv3x3_planned),
        ("docs/results/speed.md", "pool", pool),
        ("docs/results/speed.md", "photos", photos),
        ("docs/results/speed.md", "loaders", loaders),
        ("docs/results/paper.md", "paper_tables", paper_tables),
        ("docs/results/reuse.md", "reuse", reuse),
        *(("docs/results/open-questions.md", f"open_{study}", made) for study, made in open_results.TABLES.items()),
        ("docs/results/tasks.md", "scenes", tasks.scenes),
        ("docs/results/tasks.md", "detection", tasks.detection),
        ("docs/results/tasks.md", "segmentation", tasks.segmentation),
        ("docs/results/tasks.md", "faces", tasks.faces),
        ("docs/tutorials/faces.md", "faces_tutorial", tasks.faces_table),
        ("docs/how/certificates.md", "certify_flips", certificate_tables.certify_flips),
        ("docs/how/certificates.md", "certify_agreement", certificate_tables.certify_agreement),
        ("docs/how/certificates.md", "certify_proofs", certificate_tables.certify_proofs),
        ("docs/how/certificates.md", "certify_lemmas", certificate_tables.certify_lemmas),
        ("docs/how/certificates.md", "certify_soundness", certificate_tables.certify_soundness),
        ("docs/figures/certificates.svg", "certified_figure", certified_figure),
        ("docs/how/export.md", "export_networks", export_tables.export_networks),
        ("docs/how/export.md", "export_photos", export_tables.export_photos),
        ("docs/how/export.md", "export_sums", export_tables.export_sums),
        ("docs/tutorials/resnet50.md", "resnet50_learned", resnet50_learned),
        ("docs/tutorials/resnet50.md", "resnet50_accuracy", resnet50_accuracy),
        ("docs/tutorials/resnet50.md", "resnet50_speed", gpu_speed.resnet50_speed),
        ("docs/tutorials/cpu.md", "cpu_tutorial", cpu_brief),
        ("docs/compare.md", "peers", peers),
        ("benchmarks/NOTES.md", "gpu_goals", gpu_speed.gpu_goals),
        ("SECURITY.md", "fuzz", fuzz),
        ("docs/figures/overview.svg", "figure", figure),
        ("docs/figures/idea.svg", "idea", idea),
        ("docs/figures/learning.svg", "learning", sketches.learning),
        ("docs/figures/engine.svg", "engine", sketches.engine),
        ("docs/figures/kernels.svg", "kernels", sketches.kernels),
        ("docs/figures/two-certificates.svg", "two_certificates", sketches.certificates),
        ("docs/figures/accuracy-time.svg", "accuracy_against_time", accuracy_against_time),
        ("docs/figures/paper.svg", "paper_figure", paper_figure),
        ("docs/figures/reuse.svg", "reuse_figure", reuse_figure),
        *(
            (f"docs/figures/open-{study.replace('_', '-')}.svg", f"open_{study}_figure", made)
            for study, made in open_results.FIGURES.items()
        ),
        *((f"docs/figures/{name}.svg", name, made) for name, made in budget_results.figures().items()),
        ("docs/figures/speed.svg", "speed_bars", speed_bars),
        ("docs/figures/cpu.svg", "cpu_bars", cpu_bars),
    ]
}


def written(name: str) -> tuple[Path, str, str]:
    """The file of a table, its current text, and its text with the table up to date."""
    path, made = TABLES[name]
    if path.suffix == ".svg":
        return path, path.read_text() if path.exists() else "", made()
    text = path.read_text()
    begin = f"<!-- {name}: begin (written by experiments/tables.py) -->\n"
    before, _, rest = text.partition(begin)
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not end:
        raise SystemExit(f"{path} has no markers for the table {name}")
    return path, text, f"{before}{begin}{made()}\n{end}{after}"


if __name__ == "__main__":
    for name in TABLES:
        path, old, new = written(name)
        path.write_text(new)
        print(f"{path.relative_to(ROOT)}: {name} {'unchanged' if old == new else 'written'}")
