"""halve recalibrate."""

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.output import MASKS, Output, reads
from halve.masks.file import SUFFIX


def recalibrate(
    context: typer.Context,
    model: o.Model,
    masks: o.Masks,
    data: o.DataPath,
    weights: o.Weights = None,
    out: o.OptionalMasksOut = None,
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
    on_changed: o.OnChanged = "warn",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Correct BatchNorm statistics for the effect of masks, and write the masks with them to a new file.

    The checkpoint does not change: 'halve apply' and other commands use the statistics in the mask file. No labels are
    needed.

    \b
    halve recalibrate zoo.py:net --weights net.safetensors --masks net.masks.safetensors --data photos/
    """
    path = out or masks.with_name(f"{masks.name.removesuffix(SUFFIX)}.recalibrated{SUFFIX}")
    output = Output.open(context, path, MASKS, reads(MODEL=model, weights=weights, masks=masks, data=data), force)
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    source = opened.data(
        data, batch=batch, workers=workers, loader=loader, stream=stream, limit=images, shuffle=True, seed=seed
    )
    found = halve.recalibrate(
        opened.model,
        halve.load(masks),
        source.loader,
        progress=progress.track,
        on_changed=on_changed,  # type: ignore[arg-type]
    )
    output.write(found.save)
    norms, count = len(found.statistics) // 2, found.recipe["recalibrated_on_images"]
    if json:
        show.as_json(show.described(found, path) | {"norms": norms, "images": count})
        return
    show.say(f"{path}: statistics of {norms} BatchNorm layer{'' if norms == 1 else 's'} from {count:,} images")
