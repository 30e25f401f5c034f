"""halve measure."""

from pathlib import Path
from typing import Annotated

import torch
import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.output import PLAN, Output, reads


def measure(
    context: typer.Context,
    model: o.Model,
    out: Annotated[Path, typer.Option(help="File to write; 'halve learn --plan' reads it.")],
    weights: o.Weights = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images per call (default: 256 on a GPU, 8 on a CPU).")
    ] = None,
    size: o.Pixels = None,
    dtype: o.Dtype = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds per version of the network.")] = 0.5,
    device: o.Device = "auto",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Time every layer with dense and with sparse kernels on this machine, to mask only where it pays.

    Run it where the network will run. 'halve learn --plan FILE' then masks the layers that are faster sparse, without
    those that save too little for their weights.

    \b
    halve measure torchvision:resnet50 --batch 256 --out h200.json
    """
    output = Output.open(context, out, PLAN, reads(MODEL=model, weights=weights), force)
    wanted = o.type_of(dtype)
    opened = o.open_model(model, weights, device, size)
    count = batch or (256 if opened.device.type == "cuda" else 8)
    images = torch.cat([opened.example()] * -(-count // 2))[:count]
    plan = halve.measure(opened.model, images, dtype=wanted, seconds=seconds, progress=progress.track)
    path = output.write(lambda to: plan.save(to, force=force))
    if json:
        show.as_json({"file": str(path), **plan.as_json()})
        return
    rows = [
        (name, layer.shape, _ms(layer.dense_ms), _ms(layer.sparse_ms), plan.answer(name))
        for name, layer in plan.items()
    ]
    title = f"{model} on {plan.device}, {plan.dtype}, batch {plan.batch}"
    show.table(title, ("layer", "shape", ">dense ms", ">sparse ms", "mask pays"), rows)
    show.say(f"masks pay in {len(plan.paying)} of {len(plan)} layers; {plan.summary}")
    show.say(f"{path}: pass it to 'halve learn --plan'")


def _ms(time: float | None) -> str:
    return "-" if time is None else f"{time:.4f}"
