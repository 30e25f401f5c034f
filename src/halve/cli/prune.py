"""halve prune."""

from typing import Annotated

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.output import MASKS, Output, reads
from halve.errors import DataError
from halve.prune.scores import SCORES


def prune(
    context: typer.Context,
    model: o.Model,
    weights: o.Weights = None,
    score: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {score.description}" for name, score in SCORES.items()) + ".")
    ] = "magnitude",
    data: o.OptionalData = None,
    recalibrate: Annotated[
        bool, typer.Option(help="Measure BatchNorm statistics on --data and store them in the mask file.")
    ] = False,
    permute: o.Permute = False,
    permute_seconds: o.PermuteSeconds = 120.0,
    out: o.OptionalOut = None,
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: o.OrderOption = "channels",
    remainder: o.Remainder = "skip",
    plan: o.SpeedPlanOption = None,
    target: o.Target = None,
    images: o.Images = 2048,
    batch: o.Batch = 64,
    seed: o.Seed = 0,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    workers: o.Workers = None,
    loader: o.LoaderOption = "pillow",
    stream: o.Stream = False,
    device: o.Device = "auto",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Choose masks by a score, without learning, and write them to a file beside the checkpoint.

    \b
    halve prune zoo.py:net --weights net.safetensors --score wanda --data photos/ --recalibrate
    """
    needs_data = score in SCORES and SCORES[score].needs_data
    if data is None and (recalibrate or needs_data):
        raise DataError(f"{'--recalibrate' if recalibrate else f'--score {score}'} needs images: pass --data")
    path = out or o.default_masks_path(model, weights)
    output = Output.open(context, path, MASKS, reads(MODEL=model, weights=weights, data=data, plan=plan), force)
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    batches = None
    if data is not None:
        batches = opened.data(
            data, batch=batch, workers=workers, loader=loader, stream=stream, limit=images, shuffle=True, seed=seed
        ).loader
    masks = halve.prune(
        opened.model,
        score,
        batches,
        recalibrate=recalibrate,
        permute=permute,
        permute_seconds=permute_seconds,
        example=opened.example() if permute and batches is None else None,
        seed=seed,
        progress=progress.track,
        **o.selection(pattern, include, exclude, also, order, remainder, plan, target),
    ).with_recipe(source=opened.source.spec, weights=opened.source.weights, data=data)
    output.write(lambda path: masks.save(path, force=force))
    permuted = masks.recipe["permute"]
    if json:
        show.as_json(show.described(masks, path) | ({"permute": permuted} if permuted else {}))
        return
    if permuted:
        show.permuted(permuted)
    show.idle(masks)
    show.say(show.saved(masks, path))
