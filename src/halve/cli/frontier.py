"""halve frontier."""

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.frontier_picture import picture
from halve.cli.output import FRONTIER_PICTURE, MASKS, Output, reads
from halve.learn.frontier import COLUMNS, POINTS
from halve.masks.file import SUFFIX
from halve.masks.storage import write_atomically


def frontier(
    context: typer.Context,
    model: o.Model,
    data: o.DataPath,
    plan: Annotated[Path, typer.Option(help="File of 'halve measure' from the machine that the network will run on.")],
    weights: o.Weights = None,
    name: Annotated[
        Path | None, typer.Option(help="Start of the names of the files to write (default: NAME of the checkpoint).")
    ] = None,
    points: Annotated[int, typer.Option(min=1, help="Number of mask files.")] = POINTS,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time for the first point; each other one takes a quarter (default: 2).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps instead of minutes.")] = None,
    target: o.Target = None,
    images: o.Images = None,
    batch: o.Batch = 64,
    seed: o.Seed = 0,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    workers: o.Workers = None,
    loader: o.LoaderOption = "pillow",
    device: o.Device = "auto",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Learn masks at several speeds, from the fastest network to the most accurate one, and plot them.

    The first point masks every layer that is faster sparse; the others leave those dense whose masks save the fewest
    milliseconds for their cost. Writes NAME.1.masks.safetensors and so on, and NAME.frontier.svg.

    \b
    halve frontier zoo.py:net --weights net.safetensors --data photos/ --plan h200.json --target H200
    """
    start = name or o.default_masks_path(model, weights)
    start = start.with_name(start.name.removesuffix(SUFFIX))
    paths = [start.with_name(f"{start.name}.{number}{SUFFIX}") for number in range(1, points + 1)]
    inputs = reads(MODEL=model, weights=weights, data=data, plan=plan)
    outputs = [Output.open(context, path, MASKS, inputs, force, option="--name") for path in paths]
    plot = Output.open(
        context, start.with_name(f"{start.name}.frontier.svg"), FRONTIER_PICTURE, inputs, force, option="--name"
    )
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    source = opened.data(
        data, batch=batch, workers=workers, loader=loader, limit=images, shuffle=True, seed=seed, relabel=True
    )
    options: dict[str, Any] = {"minutes": minutes, "steps": steps, "target": target, "seed": seed}
    found = halve.frontier(
        opened.model,
        source.loader,
        plan,
        points=points,
        progress=progress.track,
        **{key: value for key, value in options.items() if value is not None},
    )
    for output, point in zip(outputs, found, strict=False):
        masks = point.masks.with_recipe(source=opened.source.spec, weights=opened.source.weights, data=data)
        output.write(functools.partial(masks.save, force=force))
    drawn = picture(found, f"{model}: agreement with the dense network, against time")
    plot.write(lambda path: write_atomically(path, drawn.encode()))
    if json:
        facts = [
            {
                "file": str(path),
                "layers": len(p.masks),
                "ms": p.ms,
                "speedup": p.speedup,
                "agreement": p.agreement,
                "kl": p.kl,
            }
            for path, p in zip(paths, found, strict=False)
        ]
        show.as_json(
            {
                "points": facts,
                "dense_ms": found.plan.dense_ms,
                "unmasked_ms": found.plan.unmasked_ms,
                "plot": str(plot.path),
            }
        )
        return
    rows = [(path.name, *point.cells()) for path, point in zip(paths, found, strict=False)]
    heads = ("file", *(f">{column}" for column in COLUMNS))
    show.table(f"{model} on {found.plan.device}, batch {found.plan.batch}", heads, rows)
    show.say(found.plan.summary)
    show.say(f"{plot.path} shows them; times are estimates from {plan}, 'halve bench' measures them")
