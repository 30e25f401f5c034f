"""halve verify, halve evaluate."""

from dataclasses import asdict

import typer

import halve
from halve.check.evaluate import Evaluation
from halve.cli import options as o
from halve.cli import progress, show
from halve.errors import DataError, MaskError


def verify(
    model: o.Model,
    masks: o.OptionalMasks = None,
    weights: o.Weights = None,
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: o.OrderOption = "channels",
    remainder: o.Remainder = "skip",
    json: o.Json = False,
) -> None:
    """Check that masks are legal, fit the model and its unchanged weights, and say what hardware can use them.

    Without --masks, check that the weights themselves are N:M sparse. Exit code 1 when a check fails.

    \b
    halve verify zoo.py:net --weights net.safetensors --masks net.masks.safetensors
    """
    opened = o.open_model(model, weights, "cpu")
    if masks is not None:
        if pattern or include or exclude or also or order != "channels" or remainder != "skip":
            raise MaskError("--masks says which layers are checked, and how: leave out the options that choose layers")
        outcome = halve.verify(opened.model, halve.load(masks))
    else:
        outcome = halve.verify(opened.model, **o.selection(pattern, include, exclude, also, order, remainder))
    if json:
        layers = [asdict(layer) | {"pattern": str(layer.pattern)} for layer in outcome.layers]
        show.as_json({"ok": outcome.ok, "failures": outcome.failures, "layers": layers})
    else:
        rows = [
            (
                layer.name,
                str(layer.pattern),
                "legal" if layer.legal else "not legal",
                layer.state if layer.update is None else f"changed by about {100 * layer.update:.2g} %",
                layer.not_tensorrt or "yes",
                layer.not_tensor_cores or "yes",
            )
            for layer in outcome.layers
        ]
        show.table(model, ("layer", "pattern", "mask", "weight", "TensorRT", "sparse tensor cores"), rows)
        for name, failure in outcome.failures.items():
            show.fail(f"{name}: {failure}")
        if not outcome.layers:
            show.fail("no layer to check")
        passed = len(outcome.layers) - len(outcome.failures)
        show.say(f"{passed} of {len(outcome.layers)} layers ok")
    if not outcome.ok:
        raise typer.Exit(1)


def evaluate(
    model: o.Model,
    data: o.DataPath,
    masks: o.OptionalMasks = None,
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
    """Measure accuracy, and agreement with the dense model when masks are given.

    \b
    halve evaluate zoo.py:net --weights net.safetensors --masks net.masks.safetensors --data photos/
    """
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    source = opened.data(data, batch=batch, workers=workers, limit=images, classes_file=classes)
    result = halve.evaluate(
        opened.model,
        halve.load(masks) if masks is not None else None,
        source.loader,
        classes=source.classes,
        progress=progress.track,
        on_changed=on_changed,  # type: ignore[arg-type]
    )
    if result.top1 is None and result.agreement is None:
        raise DataError(f"{data} has no labels and no masks are given: there is nothing to measure")
    if source.classes is None and 0 < len(source.class_names) < result.outputs:
        show.note(
            f"note: {data} has {len(source.class_names)} classes, the model {result.outputs} outputs; "
            f"class i is taken for output i, --classes FILE says otherwise"
        )
    if json:
        show.as_json(asdict(result))
        return
    rows = [row_of("dense", result, dense=True)] if masks is not None else []
    show.table(
        f"{model} on {data}, {result.images:,} images",
        ("", ">top-1", ">top-5", ">agreement", ">mean KL"),
        [*rows, row_of("masked" if masks is not None else "model", result)],
    )


def row_of(name: str, result: Evaluation, dense: bool = False) -> tuple[str, ...]:
    """One row of an accuracy table."""
    if dense:
        return name, show.percent(result.dense_top1), show.percent(result.dense_top5), "", ""
    kl = "-" if result.kl is None else f"{result.kl:.4f}"
    return name, show.percent(result.top1), show.percent(result.top5), show.percent(result.agreement), kl
