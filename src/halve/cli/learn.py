"""halve learn."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.errors import LearningError
from halve.learn.run_state import SUFFIX as LEARNING_SUFFIX
from halve.masks.file import SUFFIX
from halve.prune.scores import SCORES


def learn(
    model: o.Model,
    data: o.DataPath,
    weights: o.Weights = None,
    out: o.OptionalOut = None,
    steps: Annotated[int | None, typer.Option(help="Budget in steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Budget in passes over the images.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Budget in minutes (default 2).")] = None,
    objective: Annotated[str | None, typer.Option(help="distill (default, no labels needed) or task.")] = None,
    match: Annotated[
        str,
        typer.Option(
            help="Matched in distilling: all, both (outputs and features), outputs, features or probabilities."
        ),
    ] = "all",
    features: Annotated[
        list[str] | None, typer.Option(help="Blocks to match, by glob (default: found); repeatable.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help=f"{', '.join(SCORES)}, glorot, or a mask file to go on from.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Sharpness of the start (default 8).")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the Gumbel-Softmax (default 1).")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the logits (default 0.07).")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Scale of the Gumbel noise (default: from 1 to 0 at four fifths of the run).")
    ] = None,
    augment: Annotated[bool, typer.Option(help="Flip, crop and mix the images that are distilled on.")] = True,
    accumulate: Annotated[int, typer.Option(help="Batches per step.")] = 1,
    preset: Annotated[str | None, typer.Option(help="'paper': the paper's own recipe; needs labels.")] = None,
    classes: o.Classes = None,
    permute: Annotated[
        bool | None,
        typer.Option(help="Look for channel orders in which blocks keep more (default: where the model allows it)."),
    ] = None,
    permute_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="How long to look for orders (default: 120 with --permute; a quarter of --minutes)."),
    ] = None,
    recalibrate: Annotated[bool, typer.Option(help="Afterwards also measure BatchNorm statistics on --data.")] = False,
    max_drop: Annotated[
        float | None, typer.Option(help="Leave the costliest layers dense until no more is lost.")
    ] = None,
    drop_data: Annotated[str | None, typer.Option(help="Images that the drop is measured on.")] = None,
    drop_metric: Annotated[str, typer.Option(help="agreement, or top1 (needs labels).")] = "agreement",
    checkpoint: Annotated[
        Path | None, typer.Option(help="State of the run, for --resume (default: beside --out).")
    ] = None,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint.")] = False,
    log: Annotated[
        Path | None, typer.Option(help="JSONL file with loss, entropy, changed blocks, images per second.")
    ] = None,
    tracker: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb ... through Accelerate; repeatable.")
    ] = None,
    precision: Annotated[str, typer.Option(help="auto (bfloat16 on a GPU), float32 or bfloat16.")] = "auto",
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: Annotated[str | None, typer.Option(help="Blocks along input 'channels' (default), or 'flat'.")] = None,
    remainder: Annotated[
        str | None, typer.Option(help="Channels that are no multiple of M: skip (default), pad, error.")
    ] = None,
    images: o.Images = None,
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
    """Learn masks from images, so that the masked network does what the dense one does; no labels needed.

    Ctrl-C keeps what was learned; --resume goes on. Under torchrun all processes learn together.

    \b
    halve learn zoo.py:net --weights net.safetensors --data photos/ --minutes 5
    """
    path = o.writable(out or o.default_masks_path(model, weights))
    state = checkpoint or path.with_name(path.name.removesuffix(SUFFIX) + LEARNING_SUFFIX)
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    source = opened.data(
        data, batch=batch, workers=workers, limit=images, shuffle=True, seed=seed, classes_file=classes, relabel=True
    )
    drop = None
    if drop_data is not None:
        drop = opened.data(drop_data, batch=batch, workers=workers, classes_file=classes, relabel=True).loader
    where: dict[str, Any] = dict(o.selection(pattern, include, exclude, also, order or "channels", remainder or "skip"))
    if preset is not None:  # what is not said here is the preset's to say
        said = {
            "pattern": pattern,
            "order": order,
            "remainder": remainder,
            "include": include,
            "exclude": exclude,
            "also": also,
        }
        where = {key: where[key] for key, value in said.items() if value is not None}
    how: dict[str, Any] = {
        "steps": steps,
        "epochs": epochs,
        "minutes": minutes,
        "objective": objective,
        "alpha": alpha,
        "lr": lr,
        "temperature": temperature,
        "noise": noise,
        "augment": None if augment else False,
        "features": tuple(features) if features else None,
        "start": None if start is None else halve.load(start) if Path(start).is_file() else start,
    }
    try:
        with progress.Learning() as bar:
            masks = halve.learn(
                opened.model,
                source.loader,
                preset=preset,
                precision=precision,  # type: ignore[arg-type]
                checkpoint=state,
                checkpoint_every=checkpoint_every,
                resume=resume,
                log=log,
                trackers=tracker or (),
                report=bar,
                progress=progress.track,
                permute=permute,
                permute_seconds=permute_seconds,
                max_drop=max_drop,
                drop_data=drop,
                drop_metric=drop_metric,  # type: ignore[arg-type]
                match=match,  # type: ignore[arg-type]
                accumulate=accumulate,
                seed=seed,
                **where,
                **{key: value for key, value in how.items() if value is not None},
            )
    except LearningError as error:
        if not isinstance(error.masks, halve.MaskSet):
            raise
        error.masks.save(path)
        raise LearningError(f"{error}; the masks as they were then are in {path}", error.masks) from error
    interrupted = masks.recipe["ended"] == "interrupted"
    if recalibrate and not interrupted:
        masks = halve.recalibrate(opened.model, masks, source.loader, progress=progress.track)
    if int(os.environ.get("RANK", "0")) == 0:
        masks.with_recipe(source=opened.source.spec, weights=opened.source.weights, data=data).save(path)
        if interrupted:
            show.note(f"{path} holds what was learned; the same command with --resume goes on from {state}")
        else:
            state.unlink(missing_ok=True)
            _tell(masks, path, json)
    if interrupted:
        raise typer.Exit(130)


def _tell(masks: halve.MaskSet, path: Path, json: bool) -> None:
    recipe = masks.recipe
    if json:
        told = ("steps_done", "seconds", "ended", "permute", "not_permuted", "drop", "left_dense")
        about = {key: recipe[key] for key in told if recipe.get(key) is not None}
        show.as_json(
            {"file": str(path), "layers": len(masks), "weights": masks.weights, "density": masks.density} | about
        )
        return
    if recipe["permute"]:
        show.permuted(recipe["permute"])
    elif recipe.get("not_permuted"):
        show.note(f"note: channels stay in their order: {recipe['not_permuted']}")
    show.say(
        f"{path}: {len(masks)} layers, {masks.weights:,} weights, {show.percent(masks.density, 1)} kept, "
        f"{show.size(path.stat().st_size)} on disk; {recipe['steps_done']} steps in {recipe['seconds']:.0f} s"
    )
    if recipe.get("left_dense"):
        rows = [(name, f"{cost:.4f}") for name, cost in recipe["left_dense"].items()]
        show.table(f"left dense, so that the drop is {show.percent(recipe['drop'])}", ("layer", ">cost, KL"), rows)
