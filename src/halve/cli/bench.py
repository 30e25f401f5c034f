"""halve bench."""

import json as json_
from pathlib import Path
from typing import Annotated

import torch
import typer

import halve
from halve.bench import records
from halve.bench.bench import Measurement
from halve.bench.systems import DENSE, SYSTEMS
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.compile import show_plan
from halve.cli.output import RESULTS, Output, reads
from halve.machine import device_name
from halve.masks.storage import write_atomically

ON_GPU, ON_CPU = (1, 32, 256), (1, 8)  # batch sizes


def bench(
    context: typer.Context,
    model: o.Model,
    weights: o.Weights = None,
    masks: Annotated[Path | None, typer.Option(help="Mask file; by default masks are made by magnitude.")] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Images per call (default: 1, 32 and 256 on a GPU, 1 and 8 on a CPU). Repeatable."),
    ] = None,
    size: o.Pixels = None,
    dtype: o.Dtype = None,
    systems: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(SYSTEMS)}. Repeatable, or separated by commas.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds per system and batch size.")] = 0.5,
    plan: Annotated[bool, typer.Option("--plan", help="Also show which kernel each layer runs on, and why.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the measurements to this file, as JSON.")] = None,
    device: o.Device = "auto",
    on_changed: o.OnChanged = "warn",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Measure how fast the masked network runs, compiled by halve and by other systems.

    Systems take turns. The speed-up is relative to best_dense, the fastest dense version of the same network, or on a
    CPU to compile_freezing. The exit code is 1 if nothing could be measured.

    \b
    halve bench torchvision:resnet50 --batch 1 --batch 256 --plan
    """
    inputs = reads(MODEL=model, weights=weights, masks=masks)
    output = None if out is None else Output.open(context, out, RESULTS, inputs, force)
    wanted = o.type_of(dtype)
    opened = o.open_model(model, weights, device, size)
    if masks is None:
        show.note("note: no --masks given, using magnitude; the speed does not depend on which weights are kept")
    on_gpu = opened.device.type == "cuda"
    computed = wanted or (torch.float16 if on_gpu else torch.float32)
    found = halve.bench(
        opened.model,
        halve.prune(opened.model, progress=False) if masks is None else halve.load(masks),
        opened.example(),
        batch_sizes=batch or (ON_GPU if on_gpu else ON_CPU),
        dtype=computed,
        systems=[name for given in systems for name in given.split(",")] if systems else None,
        seconds=seconds,
        on_changed=on_changed,  # type: ignore[arg-type]
        progress=progress.track,
    )
    results = {
        "measurements": records.records(found, model, computed, opened.device),
        "layers": records.layer_records(found, model, computed, opened.device),
    }
    if output is not None:
        text = json_.dumps(results, indent=1) + "\n"
        output.write(lambda path: write_atomically(path, text.encode()))
    if json:
        show.as_json(results)
    else:
        _show(found, f"{model}, {str(computed).removeprefix('torch.')}, {device_name(opened.device)}", plan)
    if all(one.error for one in found):
        raise typer.Exit(1)


def _show(found: list[Measurement], title: str, plan: bool) -> None:
    columns = ("batch", "system", "median ms", "p10-p90", "images/s", "speed-up", "memory", "mJ/image")
    dense: dict[int, float] = {}  # the fastest dense version at each batch size
    for one in found:
        if one.system in DENSE and one.median_ms is not None:
            dense[one.batch] = min(one.median_ms, dense.get(one.batch, one.median_ms))
    show.table(
        title,
        [f">{column}" if column != "system" else column for column in columns],
        [_row(one, dense.get(one.batch)) for one in found],
    )
    if plan:
        for one in found:
            if one.plan:
                show_plan(one.batch, one.plan)
            elif one.system == "halve":
                show.note(f"note: batch {one.batch}: no plan, {one.note or one.error or 'no layer was timed'}")
    remarks: dict[tuple[str, str], list[int]] = {}
    for one in found:
        if text := one.error or one.note:
            remarks.setdefault((one.system, text), []).append(one.batch)
    for (system, text), batches in remarks.items():
        show.note(f"note: {system}, batch {', '.join(map(str, batches))}: {text}")


def _row(one: Measurement, dense_ms: float | None) -> tuple[str, ...]:
    if one.median_ms is None or one.p10_ms is None or one.p90_ms is None or one.images_per_second is None:
        return (str(one.batch), one.system, *["-"] * 6)
    return (
        str(one.batch),
        one.system,
        f"{one.median_ms:.3f}",
        f"{one.p10_ms:.3f}-{one.p90_ms:.3f}",
        f"{one.images_per_second:,.0f}",
        "-" if dense_ms is None else f"{dense_ms / one.median_ms:.2f} x",
        "-" if one.memory_bytes is None else show.formatted_bytes(one.memory_bytes),
        "-" if one.energy_mj_per_image is None else f"{one.energy_mj_per_image:.2f}",
    )
