"""halve export, halve check-onnx."""

from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.output import ONNX, Output, reads
from halve.errors import OptionError
from halve.export.check_onnx import OnnxCheck, Status
from halve.export.export import Exported
from halve.export.quantization import Quantization

EXIT_CODES: dict[Status, int] = {"ok": 0, "failed": 1, "none": 3}


def export(
    context: typer.Context,
    model: o.Model,
    out: Annotated[Path, typer.Option(help="File to write: NAME.onnx.")],
    masks: o.OptionalMasks = None,
    weights: o.Weights = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(o.DTYPES)} (default: float32, or float16 with --int8).")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to int8 with Q/DQ nodes; needs --calibrate.")] = False,
    calibrate: Annotated[
        str | None, typer.Option(help="With --int8: images to calibrate on, such as a folder; no labels needed.")
    ] = None,
    calibration_images: Annotated[
        int, typer.Option(min=1, help="With --int8: calibrate on this many of them, chosen at random.")
    ] = 512,
    max_drop: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="With --int8: leave sums and layers in float until at most this agreement is lost."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Images to compare the file with the masked model on (default: those of --calibrate, or noise)."
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Compare on this many images of --data.")] = 16,
    with_preprocess: Annotated[
        bool, typer.Option("--with-preprocess", help="Let the file take pixels (uint8) and normalise them.")
    ] = False,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    on_changed: o.OnChanged = "warn",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Write the masked network as an ONNX file for TensorRT, and check the file.

    The file computes what 'halve apply' gives: channels moved, BatchNorm folded, the batch size free. It is run in
    onnxruntime and compared before it is written. The table shows which layers TensorRT's sparse kernels can take, and
    which are large enough that they are likely to; whether they are used, TensorRT decides. Without --masks, the model
    is exported as it is.

    \b
    halve export zoo.py:net --weights net.safetensors --masks net.masks.safetensors --dtype float16 --out net.onnx

    \b
    halve export zoo.py:net --weights net.safetensors --masks masks.safetensors --int8 --calibrate photos --out net.onnx

    \b
    halve export zoo.py:net --weights net.safetensors --out dense.onnx     # a dense baseline
    """
    given = reads(MODEL=model, weights=weights, masks=masks, data=data, calibrate=calibrate)
    output = Output.open(context, out, ONNX, given, force)
    wanted = o.type_of(dtype)
    opened = o.open_model(model, weights, "cpu", size, resize, mean, std)
    read = None if masks is None else halve.load(masks)
    example = opened.example()
    if shown := data or calibrate:
        example = next(iter(opened.data(shown, batch=images, workers=0, limit=images).loader))
    batches = None
    if calibrate is not None:
        limit: dict[str, Any] = {"limit": calibration_images, "shuffle": True}
        batches = opened.data(calibrate, batch=32, workers=0, **limit).loader
    if with_preprocess and opened.normalization is None:
        raise OptionError("--with-preprocess: the model's preprocessing is not known; pass --size, --mean and --std")
    results: list[Exported] = []

    def write(path: Path) -> None:
        options: Any = {"dtype": wanted, "on_changed": on_changed}
        options |= {"preprocess": opened.normalization if with_preprocess else None}
        options |= {"int8": int8, "calibrate": batches, "max_drop": max_drop}
        results.append(halve.export(opened.model, read, example, path, force=force, progress=progress.track, **options))

    output.write(write)
    [done] = results
    if json:
        show.as_json(done.as_json())
        return
    _show(done.check)
    for note in done.notes:
        show.note(f"note: {note}")
    show.say(f"{done.path}: {show.formatted_bytes(done.size)}, {done.dtype}; {done.compared}")
    if done.quantization is not None:
        _show_quantization(done.quantization)
    _show_commands(done.check)


def check_onnx(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX file, of halve or of any other tool.")],
    trt_log: Annotated[
        Path | None, typer.Option(help="Log of 'trtexec --sparsity=enable --verbose': shows what TensorRT picked.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Check which layers of an ONNX file TensorRT's sparse kernels can take, and why not the others.

    Judged on the bytes of the file: 2:4 along input channels, the operator, groups, and what lies between a weight and
    its layer. 'likely' means large enough that sparse kernels have been faster; TensorRT times both and decides.

    Exit codes: 0 there are eligible layers, 1 a layer that 'halve export' masked is not eligible any more, 2 bad input,
    3 no layer is eligible.

    \b
    halve check-onnx net.onnx

    \b
    halve check-onnx net.onnx --trt-log trtexec.log --json
    """
    check = halve.check_onnx(path, trt_log=trt_log)
    if json:
        show.as_json(check.as_json())
    else:
        _show(check)
        _show_commands(check)
    if not check.ok:
        raise typer.Exit(EXIT_CODES[check.status])


def _show(check: OnnxCheck) -> None:
    show.table(str(check.path), check.columns, check.rows())
    for note in check.notes:
        show.note(f"note: {note}")
    for name, reason in check.failures.items():
        show.fail(f"{name}: {reason}")
    show.say(f"{check.status}: {check.summary}")


def _show_quantization(found: Quantization) -> None:
    costs = {**found.costs, **found.sums}
    rows = [(name, show.percent(cost), "float" if name in found.left else "int8") for name, cost in costs.items()]
    title = "what quantisation costs each layer and residual sum, alone"
    show.table(title, ("layer or sum", ">error of its output", "stays in"), rows)
    table = [
        (name, show.percent(q.agreement), "-" if q.kl is None else f"{q.kl:.4f}", show.percent(q.error))
        for name, q in found.quality.items()
    ]
    title = f"compared with the dense network on {found.held_out} held-out images"
    show.table(title, ("network in", ">agreement", ">mean KL", ">output error"), table)
    show.say(found.summary)


def _show_commands(check: OnnxCheck) -> None:
    if check.eligible:
        for version, line in check.commands.items():
            show.say(f"TensorRT {version}: {line}")
