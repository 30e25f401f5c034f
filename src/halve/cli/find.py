"""halve select, halve prune."""

from typing import Annotated

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.errors import DataError
from halve.prune.scores import SCORES


def select(
    model: o.Model,
    weights: o.Weights = None,
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: o.OrderOption = "channels",
    remainder: o.Remainder = "skip",
    json: o.Json = False,
) -> None:
    """Show every layer of a model, masked or not, and why.

    \b
    halve select torchvision:resnet50 --exclude 'layer1.*'
    """
    opened = o.open_model(model, weights, "cpu")
    chosen = halve.select(opened.model, **o.selection(pattern, include, exclude, also, order, remainder))
    rows = [
        (c.name, c.type, "x".join(map(str, c.shape)), str(c.pattern or "dense"), show.as_options(c.reason))
        for c in chosen
    ]
    if json:
        keys = ("layer", "type", "shape", "pattern", "reason")
        show.as_json(
            [dict(zip(keys, row, strict=True)) | {"masked": c.masked} for row, c in zip(rows, chosen, strict=True)]
        )
        return
    show.table(model, ("layer", "type", ">weights", "pattern", "why"), rows)
    inside = sum(c.layout.weights for c in chosen if c.layout)
    total = sum(p.numel() for p in opened.model.parameters())
    show.say(
        f"{len(chosen.masked)} of {len(chosen)} layers masked, "
        f"{show.percent(inside / max(total, 1), 1)} of all parameters"
    )


def prune(
    model: o.Model,
    weights: o.Weights = None,
    score: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {score.description}" for name, score in SCORES.items()) + ".")
    ] = "magnitude",
    data: o.OptionalData = None,
    recalibrate: Annotated[
        bool, typer.Option(help="Measure BatchNorm statistics on --data; they go into the mask file.")
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
    images: o.Images = 2048,
    batch: o.Batch = 64,
    seed: o.Seed = 0,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    workers: o.Workers = None,
    device: o.Device = "auto",
    json: o.Json = False,
) -> None:
    """Choose masks at once, by a score, and write them to a file beside the checkpoint.

    \b
    halve prune zoo.py:net --weights net.safetensors --score wanda --data photos/ --recalibrate
    """
    needs_data = score in SCORES and SCORES[score].needs_data
    if data is None and (recalibrate or needs_data):
        raise DataError(f"{'--recalibrate' if recalibrate else f'--score {score}'} needs images: pass --data")
    path = o.writable(out or o.default_masks_path(model, weights))
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    batches = None
    if data is not None:
        batches = opened.data(data, batch=batch, workers=workers, limit=images, shuffle=True, seed=seed).loader
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
        **o.selection(pattern, include, exclude, also, order, remainder),
    ).with_recipe(source=opened.source.spec, weights=opened.source.weights, data=data)
    masks.save(path)
    permuted = masks.recipe["permute"]
    if json:
        told = {"file": str(path), "layers": len(masks), "weights": masks.weights, "density": masks.density}
        show.as_json(told | ({"permute": permuted} if permuted else {}))
        return
    if permuted:
        show.permuted(permuted)
    show.say(
        f"{path}: {len(masks)} layers, {masks.weights:,} weights, {show.percent(masks.density, 1)} kept, "
        f"{show.size(path.stat().st_size)} on disk"
    )
