"""halve demo: all steps on built-in data."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import halve
from halve.check.evaluate import Evaluation
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.evaluate import row_of
from halve.cli.output import DEMO_CHECKPOINT, MASKS, PACKED, Output
from halve.errors import FileError
from halve.masks.mask import MaskSet
from halve.sources.data import load_data
from halve.sources.weights import save_state

STEPS = 200


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("demo-out"),
    seed: o.Seed = 0,
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Train a small ResNet on handwritten digits, learn which half of its weights to keep, and compare methods.

    \b
    halve demo --out demo-out
    """
    from halve.sources.digits import train_digits

    started = time.perf_counter()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot create the folder {out}: {error.strerror}") from error
    dense_output = Output.open(context, out / "digits.safetensors", DEMO_CHECKPOINT, {}, force)
    mask_output = Output.open(context, out / "digits.masks.safetensors", MASKS, {}, force)
    packed_output = Output.open(context, out / "digits.packed.safetensors", PACKED, {}, force)
    model = train_digits(seed=seed, progress=progress.track)
    test = load_data("digits:test", batch_size=250).loader
    calibration = load_data("digits:train", batch_size=128, shuffle=True, seed=seed).loader

    magnitude = halve.prune(model, "magnitude")
    with progress.Learning() as bar:
        learned = halve.learn(model, calibration, steps=STEPS, seed=seed, report=bar)
    methods: dict[str, MaskSet] = {
        "random": halve.prune(model, "random", seed=seed),
        "magnitude": magnitude,
        "magnitude, recalibrated": halve.recalibrate(model, magnitude, calibration),
        "learned": learned,
        "learned, recalibrated": halve.recalibrate(model, learned, calibration),
    }
    results = {name: halve.evaluate(model, masks, test) for name, masks in methods.items()}

    dense_file = dense_output.write(lambda path: save_state(model.state_dict(), path, "halve demo"))
    mask_file = mask_output.write(lambda path: learned.save(path, force=force))
    packed_file = packed_output.write(lambda path: halve.pack(model, learned, path, force=force))
    saved = halve.load(mask_file)
    verified = halve.verify(halve.apply(model, saved), saved)
    files = {path.name: path.stat().st_size for path in (dense_file, mask_file, packed_file)}
    seconds = time.perf_counter() - started
    if json:
        shown = {name: asdict(result) for name, result in results.items()}
        show.as_json({"results": shown, "verified": verified.ok, "files": files, "seconds": seconds})
    else:
        _show(results, learned, verified.ok, files, out, seconds)
    if not verified.ok:
        raise typer.Exit(1)


def _show(
    results: dict[str, Evaluation], masks: MaskSet, ok: bool, files: dict[str, int], out: Path, seconds: float
) -> None:
    first = next(iter(results.values()))
    show.table(
        f"A ResNet on {first.images} handwritten digits; {masks.weights:,} weights masked 2:4, none changed",
        ("masks", ">top-1", ">top-5", ">agreement", ">mean KL"),
        [row_of("none (dense)", first, dense=True), *(row_of(name, result) for name, result in results.items())],
    )
    show.say("")
    for name, count in files.items():
        show.say(f"{out / name}  {show.size(count)}")
    show.say(f"verify: {'masks applied, all tensors unchanged' if ok else 'FAILED'}; {seconds:.0f} s in total")
    show.say(f"next: halve inspect {out / 'digits.masks.safetensors'}")
