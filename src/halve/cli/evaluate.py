"""halve evaluate."""

from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer

import halve
from halve.check.evaluate import Evaluation, Task
from halve.check.per_layer import LayerLoss
from halve.cli import options as o
from halve.cli import progress, show
from halve.errors import DataError


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def evaluate(
    model: o.Model,
    data: o.DataPath,
    masks: o.MaskFiles = None,
    weights: o.Weights = None,
    task: Annotated[
        str | None, typer.Option(help=f"What the outputs are: {', '.join(get_args(Task))} (default: inferred).")
    ] = None,
    min_score: Annotated[float, typer.Option(min=0, max=1, help="Ignore boxes with a lower score.")] = 0.0,
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer",
            help="Also measure what is lost when each layer alone is masked; runs the model once more per layer.",
        ),
    ] = False,
    classes: o.Classes = None,
    images: o.Images = None,
    batch: o.Batch = 64,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    workers: o.Workers = None,
    loader: o.LoaderOption = "pillow",
    stream: o.Stream = False,
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
    lists = {"lists": True} if task == "detection" else {}
    reading: dict[str, Any] = {"batch": batch, "workers": workers, "loader": loader, "stream": stream, **lists}
    source = opened.data(data, **reading, limit=images, classes_file=classes)
    # all of them, before anything takes long
    read: dict[str, halve.MaskSet | None] = {str(path): halve.load(path) for path in masks or ()}
    results = {
        name: halve.evaluate(
            opened.model,
            one,
            source.loader,
            task=task,  # type: ignore[arg-type]
            classes=source.classes,
            min_score=min_score,
            per_layer=per_layer,
            progress=progress.track,
            on_changed=on_changed,  # type: ignore[arg-type]
        )
        for name, one in (read or {"model": None}).items()
    }
    result = next(iter(results.values()))
    if not read and result.top1 is None:
        raise DataError(f"nothing to measure: {data} has no labels, and there are no --masks to compare")
    of_images = result.task == "classification" and result.outputs is not None
    if of_images and source.classes is None and 0 < len(source.class_names) < (result.outputs or 0):
        show.note(
            f"note: {data} has {len(source.class_names)} classes, the model {result.outputs} outputs; "
            f"class i counts as output i, unless --classes FILE maps them"
        )
    if json:
        listed = [{"masks": name} | one.as_json() for name, one in results.items()]
        show.as_json(listed if len(listed) > 1 else result.as_json())
        return
    if result.task == "detection" and result.boxes == result.dense_boxes == 0:
        show.note("note: neither network returned a box" + (f" with a score of {min_score} or more" * (min_score > 0)))
    rows = [row_of("dense", result, dense=True)] if read else []
    show.table(
        f"{model} on {data}, {result.images:,} images",
        ("", *(f">{column}" for column in COLUMNS[result.task])),
        [*rows, *(row_of("masked" if len(read) == 1 else name, one) for name, one in results.items())],
    )
    for name, one in results.items():
        if one.layers is not None:
            _show_layers(name, one)


def _cost(loss: LayerLoss) -> float:
    return next((cost for cost in (loss.kl, loss.output_error, loss.feature_error) if cost is not None), 0.0)


def _show_layers(name: str, result: Evaluation) -> None:
    """Print what each mask costs, the costliest first."""
    losses = sorted((result.layers or {}).items(), key=lambda item: -_cost(item[1]))
    shown: dict[str, Callable[[Any], str]] = {"agreement": show.percent, "kl": _number, "output_error": show.percent}
    known = {key: form for key, form in shown.items() if any(getattr(loss, key) is not None for _, loss in losses)}
    rows = [
        (layer, show.percent(loss.feature_error), *(form(getattr(loss, key)) for key, form in known.items()))
        for layer, loss in losses
    ]
    heads = ("layer", ">feature error", *(f">{'mean KL' if key == 'kl' else key.replace('_', ' ')}" for key in known))
    show.table(f"{name}, each layer masked alone", heads, rows)


# The columns of each task: the field of an `Evaluation`, and how it is shown.
COLUMNS: dict[str, dict[str, tuple[str, Callable[[Any], str]]]] = {
    "classification": {
        "top-1": ("top1", show.percent),
        "top-5": ("top5", show.percent),
        "agreement": ("agreement", show.percent),
        "95 % interval": ("agreement_interval", show.interval),
        "mean KL": ("kl", _number),
    },
    "segmentation": {
        "pixel accuracy": ("top1", show.percent),
        "mIoU": ("miou", show.percent),
        "agreement": ("agreement", show.percent),
        "mIoU to dense": ("miou_to_dense", show.percent),
        "mean KL": ("kl", _number),
    },
    "detection": {
        "boxes": ("boxes", _count),
        "agreement": ("agreement", show.percent),
        "precision": ("precision", show.percent),
        "recall": ("recall", show.percent),
    },
    "regression": {"output error": ("output_error", show.percent)},
}


def row_of(name: str, result: Evaluation, dense: bool = False) -> tuple[str, ...]:
    """Return one row of a table, with the columns of the task."""
    cells = []
    for field, shown in COLUMNS[result.task].values():
        known = hasattr(result, f"dense_{field}")
        cells.append("" if dense and not known else shown(getattr(result, f"dense_{field}" if dense else field)))
    return name, *cells
