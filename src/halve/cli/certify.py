"""halve certify."""

from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.output import CERTIFICATE, Output, reads
from halve.errors import CertificateError, OptionError

NOT_PROVEN = 1  # exit code: the certificate does not say what was asked for, or does not hold


def certify(
    context: typer.Context,
    model: o.Model,
    data: o.DataPath,
    masks: o.MaskFiles = None,
    weights: o.Weights = None,
    reference: Annotated[
        Path | None, typer.Option(help="Checkpoint whose predictions are to be kept (default: --weights, dense).")
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option(
            help="ONNX file to compare with the reference instead of --masks. It runs in onnxruntime on the CPU."
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Stop as soon as this share is proven or refuted, such as 0.99."),
    ] = None,
    confidence: Annotated[float, typer.Option(min=0, max=1, help="Confidence level of the statement.")] = 0.999,
    by: Annotated[
        str | None, typer.Option(help="Also certify each 'class' that the dense network predicts, or each 'label'.")
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(help="Prove for each image that no change of pixels by this, such as 2/255, changes the class."),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            help="Prove for each image that no update of the weights by this share of their root mean square, such as "
            "1e-3, changes the class; 'radius' finds the largest."
        ),
    ] = None,
    absolute: Annotated[
        bool, typer.Option("--absolute", help="With --reuse: the size is that of weights, not a share of their layer.")
    ] = False,
    layers: Annotated[
        list[str] | None, typer.Option(help="With --reuse: only layers that match this glob are updated. Repeatable.")
    ] = None,
    also_dense: Annotated[
        bool, typer.Option("--also-dense", help="With --reuse: also prove it for the dense network.")
    ] = False,
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement", help="With --reuse: prove that masked and dense network agree after the same update."
        ),
    ] = False,
    changed_blocks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prove that no change of up to this many blocks of the masks changes the class, and attack it."
        ),
    ] = None,
    branches: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --region, --reuse or --changed-blocks: split failed proofs into up to this many parts.",
        ),
    ] = 0,
    check: Annotated[Path | None, typer.Option(help="Compute this certificate again; fail if it is not true.")] = None,
    out: Annotated[Path | None, typer.Option(help="Certificate to write, customarily NAME.certificate.json.")] = None,
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
    """Certify what masks do not change: how often predictions stay the same, from images without labels.

    Two mask files are compared with each other on the same images, an exported file (--onnx) with the dense network.
    Statements about single images are proven with --region, --reuse and --changed-blocks, which takes seconds for each:
    --images limits their number, a GPU takes several at once. A certificate is computed again with --check. Exit
    codes: 0 if it is proven or holds, 1 if not, 2 for bad input.

    \b
    halve certify zoo.py:net --weights net.safetensors --masks net.masks.safetensors --data photos/

    \b
    halve certify zoo.py:net --weights net.safetensors --onnx net.onnx --data photos/
    """
    files = list(masks or ())
    if len(files) > 2:
        raise OptionError(f"--masks names one file, or two to compare; got {len(files)}")
    if onnx is not None and files:
        raise OptionError("--onnx cannot be combined with --masks: the file has its masks in its weights")
    if absolute and reuse is None:
        raise OptionError("--absolute is for --reuse")
    output = None
    if out is not None:
        inputs = reads(MODEL=model, weights=weights, reference=reference, onnx=onnx, data=data, check=check)
        inputs |= {"--masks": files}
        output = Output.open(context, out, CERTIFICATE, inputs, force)
    claimed = None if check is None else halve.Certificate.load(check)
    read = [halve.load(path) for path in files]  # all of them, before anything takes long
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    other = None if reference is None else o.open_model(model, reference, device, size, resize, mean, std).model
    proof: dict[str, Any] = {"layers": layers or None, "also_dense": also_dense, "agreement": agreement}
    proof |= {"relative": not absolute, "changed_blocks": changed_blocks, "branches": branches}
    if device.startswith("cuda"):  # by default bounds are computed on the CPU, wherever the model is
        proof["device"] = "cuda"
    if region is not None:
        if opened.normalization is None:
            raise OptionError("--region needs to know how pixels are normalised: pass --size, --mean and --std")
        proof |= {"region": _number("--region", region)} | dict(zip(("mean", "std"), opened.normalization, strict=True))
    if reuse is not None:
        proof["reuse"] = reuse if reuse == "radius" else _number("--reuse", reuse)
    # in random order: a folder is sorted by class, and counting may stop early
    source = opened.data(data, batch=batch, workers=workers, loader=loader, limit=images, shuffle=True)
    certified = opened.model
    if onnx is not None:
        certified, other = halve.load_onnx(onnx, preprocess=opened.normalization), other or opened.model
    try:
        found = halve.certify(
            certified,
            read[0] if read else None,
            source.loader,
            against=read[1] if len(read) > 1 else None,
            reference=other,
            share=share,
            confidence=confidence,
            by=by,
            **proof,
            check=claimed,
            progress=progress.track,
            on_changed=on_changed,  # type: ignore[arg-type]
        )
    except CertificateError as error:
        show.fail(str(error))
        raise typer.Exit(NOT_PROVEN) from error
    if output is not None:
        output.write(lambda path: found.save(path, force=force))
    if json:
        show.as_json(found.as_json())
    else:
        _show(found, check)
    if check is None and (found.result.get("reached") is False or found.result.get("vacuous")):
        raise typer.Exit(NOT_PROVEN)


def _number(option: str, text: str) -> float:
    """A number, also as a fraction: 2/255."""
    try:
        above, _, below = text.partition("/")
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError) as error:
        raise OptionError(f"{option} must be a number such as 0.01 or 2/255, got {text!r}") from error


def _show(found: halve.Certificate, check: Path | None) -> None:
    if check is not None:
        show.say(f"{check} holds: computed again, with the same result")
    show.say(str(found))
    if groups := found.result.get("groups"):
        rows = [
            (name, str(one["images"]), show.percent(one["agreement"]), show.percent(one["share"]))
            for name, one in groups.items()
        ]
        show.table("all of these hold together", ("group", ">images", ">agreement", ">at least"), rows)
    if needed := found.result.get("images_needed"):
        show.note(f"note: with this agreement, it would take about {needed:,} images")
    for assumption in found.assumptions:
        show.say(f"  assuming that {assumption}")
