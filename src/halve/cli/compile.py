"""halve compile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.output import COMPILED, Output, reads
from halve.engine.plan import COLUMNS, Entry


def compile(
    context: typer.Context,
    model: o.Model,
    out: Annotated[Path, typer.Option(help="File to write; halve.load_compiled reads it.")],
    masks: Annotated[
        Path | None, typer.Option(help="Mask file (default: none, all weights stay, on the fastest dense kernels).")
    ] = None,
    weights: o.Weights = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch sizes that are timed and recorded (default: 1). Repeatable.")
    ] = None,
    size: o.Pixels = None,
    dtype: o.Dtype = None,
    device: o.Device = "auto",
    any_size: Annotated[
        bool, typer.Option("--any-size", help="Accept other image sizes than --size, if the model does.")
    ] = False,
    on_changed: o.OnChanged = "warn",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Compile the network for inference, masked or not, and save it with its plan and packed weights.

    The compiled network takes any batch size. Inputs must have the dtype and image size that was compiled for.

    \b
    halve compile torchvision:resnet50 --masks masks.safetensors --batch 1 --batch 32 --out fast.compiled.safetensors
    """
    output = Output.open(context, out, COMPILED, reads(MODEL=model, weights=weights, masks=masks), force)
    wanted = o.type_of(dtype)
    opened = o.open_model(model, weights, device, size)
    computed = wanted or (torch.float16 if opened.device.type == "cuda" else torch.float32)
    example = opened.example().to(computed)
    sizes = tuple(dict.fromkeys(batch or [1]))
    images = torch.cat([example] * -(-sizes[0] // 2))[: sizes[0]]
    fast = halve.compile(
        opened.model,
        None if masks is None else halve.load(masks),
        images,
        batch_sizes=sizes[1:],
        any_size=any_size,
        on_changed=on_changed,  # type: ignore[arg-type]
        progress=progress.track,
    )
    path = output.write(lambda to: fast.save(to, force=force))
    if json:
        about = {"file": str(path), "bytes": path.stat().st_size, "code_bytes": fast.plan.code_bytes}
        show.as_json(about | {"plan": fast.plan.as_json()})
        return
    if masks is None:
        show.say("no masks: all weights kept")
    for size_, entries in fast.plan.batches.items():
        show_plan(size_, entries)
    for line in fast.plan.notes():
        show.say(line)
    for name, reason in fast.plan.uncompiled.items():
        show.note(f"note: {name}: {reason}")
    show.say(f"{path}: {show.formatted_bytes(path.stat().st_size)}; halve.load_compiled reads it")


def show_plan(batch: int, entries: Sequence[Entry]) -> None:
    """Print which kernel each layer runs on."""
    sparse = sum(entry.sparse for entry in entries)
    heads = [f">{head}" if head.endswith("ms") else head for head in COLUMNS]
    show.say("")
    show.table(f"batch {batch}: {sparse} of {len(entries)} layers sparse", heads, [entry.cells() for entry in entries])
