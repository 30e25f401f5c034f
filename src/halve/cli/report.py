"""halve report."""

from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.output import REPORT, Output, reads
from halve.errors import OptionError
from halve.masks.file import SUFFIX as MASKS_SUFFIX
from halve.report.page import SUFFIX
from halve.report.pictures import PICTURES


def report(
    context: typer.Context,
    masks: Annotated[
        list[Path],
        typer.Argument(metavar="MASKS...", help="Mask files; the page is about the first, and compares all."),
    ],
    out: Annotated[Path | None, typer.Option(help=f"Page to write (default: NAME{SUFFIX} beside MASKS).")] = None,
    log: Annotated[Path | None, typer.Option(help="Log of 'halve learn --log': the learning curve.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Times: file of 'halve measure', 'halve bench --out' or 'halve compile --json'."),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(help="Output of 'halve evaluate --json'; with --per-layer also what each mask costs."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="ONNX file, or output of 'halve export' or 'halve check-onnx' with --json.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="File of 'halve certify --out'.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --data: show images on which predictions differ.")
    ] = None,
    weights: o.Weights = None,
    data: o.OptionalData = None,
    classes: o.Classes = None,
    pictures: Annotated[int, typer.Option(min=0, help="Show at most this many images.")] = PICTURES,
    images: o.Images = None,
    batch: o.Batch = 64,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    workers: o.Workers = None,
    loader: o.LoaderOption = "pillow",
    device: o.Device = "auto",
    on_changed: o.OnChanged = "warn",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Write a page about masks: verdict, learning curve, layers, images on which predictions differ.

    One HTML file that needs nothing else. A part appears if its input is given.

    \b
    halve report net.masks.safetensors --log net.jsonl --plan h200.json --model zoo.py:net --data photos/
    """
    path = out or masks[0].with_name(masks[0].name.removesuffix(MASKS_SUFFIX) + SUFFIX)
    given = {"log": log, "plan": plan, "evaluation": evaluation, "export": export, "certificate": certificate}
    inputs = reads(**given, model=model, weights=weights, data=data, classes=classes) | {"MASKS": masks}
    output = Output.open(context, path, REPORT, inputs, force)
    if (model is None) != (data is None):
        raise OptionError("pictures need both --model and --data")
    options: dict[str, Any] = given | {"pictures": pictures, "on_changed": on_changed, "progress": progress.track}
    if export is not None and export.suffix == ".onnx":
        options["export"] = halve.check_onnx(export)
    if model is not None and data is not None:
        opened = o.open_model(model, weights, device, size, resize, mean, std)
        source = opened.data(data, batch=batch, workers=workers, loader=loader, limit=images, classes_file=classes)
        options |= {"model": opened.model, "data": source.loader, "class_names": _names(source, classes)}
        options |= {key: _floats(getattr(opened.preprocess, key, None)) for key in ("mean", "std")}
    made = halve.report(masks, **options)
    output.write(lambda to: made.save(to, force=force))
    if json:
        show.as_json({"file": str(path), **made.facts})
        return
    show.say(str(made))
    show.say(f"{path}: {show.formatted_bytes(path.stat().st_size)}; open it in a browser")


def _names(source: Any, classes: Path | None) -> tuple[str, ...] | None:
    """The names of the model's outputs: lines of --classes, or the class folders if there are no others."""
    if classes is None:
        return source.class_names or None
    return tuple(line.strip() for line in classes.read_text(encoding="utf-8-sig").splitlines())


def _floats(values: Any) -> list[float] | None:
    """The mean or standard deviation of a preprocessing, if it says them."""
    return [float(value) for value in values] if isinstance(values, list | tuple) and len(values) in (1, 3) else None
