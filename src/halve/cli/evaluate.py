"""halve evaluate."""

from dataclasses import asdict

import halve
from halve.check.evaluate import Evaluation
from halve.cli import options as o
from halve.cli import progress, show
from halve.errors import DataError


def evaluate(
    model: o.Model,
    data: o.DataPath,
    masks: o.MaskFiles = None,
    weights: o.Weights = None,
    classes: o.Classes = None,
    images: o.Images = None,
    batch: o.Batch = 64,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    workers: o.Workers = None,
    device: o.Device = "auto",
    on_changed: o.OnChanged = "warn",
    json: o.Json = False,
) -> None:
    """Measure accuracy and, with masks, agreement with the dense model.

    Several mask files are compared in one table.

    \b
    halve evaluate zoo.py:net --weights net.safetensors --masks net.masks.safetensors --data photos/
    """
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    source = opened.data(data, batch=batch, workers=workers, limit=images, classes_file=classes)
    # all of them, before anything takes long
    read: dict[str, halve.MaskSet | None] = {str(path): halve.load(path) for path in masks or ()}
    results = {
        name: halve.evaluate(
            opened.model,
            one,
            source.loader,
            classes=source.classes,
            progress=progress.track,
            on_changed=on_changed,  # type: ignore[arg-type]
        )
        for name, one in (read or {"model": None}).items()
    }
    result = next(iter(results.values()))
    if result.top1 is None and result.agreement is None:
        raise DataError(f"nothing to measure: {data} has no labels, and there are no --masks to compare")
    if source.classes is None and 0 < len(source.class_names) < result.outputs:
        show.note(
            f"note: {data} has {len(source.class_names)} classes, the model {result.outputs} outputs; "
            f"class i counts as output i, unless --classes FILE maps them"
        )
    if json:
        listed = [{"masks": name} | asdict(one) for name, one in results.items()]
        show.as_json(listed if len(listed) > 1 else asdict(result))
        return
    rows = [row_of("dense", result, dense=True)] if read else []
    show.table(
        f"{model} on {data}, {result.images:,} images",
        ("", ">top-1", ">top-5", ">agreement", ">mean KL"),
        [*rows, *(row_of("masked" if len(read) == 1 else name, one) for name, one in results.items())],
    )


def row_of(name: str, result: Evaluation, dense: bool = False) -> tuple[str, ...]:
    """Return one row of an accuracy table."""
    if dense:
        return name, show.percent(result.dense_top1), show.percent(result.dense_top5), "", ""
    kl = "-" if result.kl is None else f"{result.kl:.4f}"
    return name, show.percent(result.top1), show.percent(result.top5), show.percent(result.agreement), kl
