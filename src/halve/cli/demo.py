"""halve demo: all steps on built-in data."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

import halve
from halve.check.evaluate import Evaluation
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.demo_picture import Letter, picture
from halve.cli.evaluate import row_of
from halve.cli.output import DEMO_CHECKPOINT, DEMO_MODEL, DEMO_PICTURE, MADE_BY_DEMO, MASKS, PACKED, Output
from halve.errors import FileError
from halve.masks.mask import MaskSet
from halve.masks.storage import write_atomically
from halve.sources.data import load_data
from halve.sources.letters import NAMES, letters, train_letters
from halve.sources.weights import save_state

STEPS = 1000
MAGNITUDE = "magnitude, recalibrated"
SHOWN = 12  # letters in the picture
MODEL_FILE = f"""# {MADE_BY_DEMO}: the network, which commands name as net.py:net
from halve.sources.letters import LettersResNet as net
"""


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("demo-out"),
    seed: o.Seed = 0,
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Train a small network, learn which half of its weights to keep, compare with other masks, draw the result.

    The network reads letters that are rendered for the demo. This takes about two minutes on two cores.

    \b
    halve demo --out demo-out
    """
    started = time.perf_counter()
    outputs = _outputs(context, out, force)
    for split in progress.track(("train", "test"), "drawing letters"):
        letters(split)
    model = train_letters(seed=seed, progress=progress.track)
    test = load_data("letters:test", batch_size=256).loader
    calibration = load_data("letters:train", batch_size=128, shuffle=True, seed=seed).loader

    with progress.Learning() as bar:  # no augmentation: there are images enough, and mirrored letters are none
        learned = halve.learn(
            *(model, calibration), steps=STEPS, augment=False, seed=seed, report=bar, progress=progress.track
        )
    magnitude = halve.prune(model, "magnitude", progress=False)
    methods: dict[str, MaskSet] = {
        "random": halve.prune(model, "random", seed=seed, progress=False),
        "magnitude": magnitude,
        MAGNITUDE: halve.recalibrate(model, magnitude, calibration, progress=progress.track),
        "learned": learned,
    }
    results = {
        name: halve.evaluate(model, methods[name], test, progress=False)
        for name in progress.track(list(methods), "evaluating")
    }

    drawing = _drawing(model, methods, results)
    files = [
        outputs["net.py"].write(lambda path: write_atomically(path, MODEL_FILE.encode())),
        outputs["letters.safetensors"].write(lambda path: save_state(model.state_dict(), path, "halve demo")),
        outputs["letters.masks.safetensors"].write(lambda path: learned.save(path, force=force)),
        outputs["magnitude.masks.safetensors"].write(lambda path: methods[MAGNITUDE].save(path, force=force)),
        outputs["letters.packed.safetensors"].write(lambda path: halve.pack(model, learned, path, force=force)),
        outputs["demo.svg"].write(lambda path: write_atomically(path, drawing.encode())),
    ]
    written = halve.load(out / "letters.masks.safetensors")
    verified = halve.verify(halve.apply(model, written), written)
    sizes = {path.name: path.stat().st_size for path in files}
    seconds = time.perf_counter() - started
    if json:
        shown = {name: asdict(result) for name, result in results.items()}
        show.as_json({"results": shown, "verified": verified.ok, "files": sizes, "seconds": seconds})
    else:
        _show(results, learned, verified.ok, sizes, out, seconds)
    if not verified.ok:
        raise typer.Exit(1)


def _outputs(context: typer.Context, out: Path, force: bool) -> dict[str, Output]:
    """The files that the demo writes, checked before anything is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot create the folder {out}: {error.strerror}") from error
    kinds = {
        "net.py": DEMO_MODEL,
        "letters.safetensors": DEMO_CHECKPOINT,
        "letters.masks.safetensors": MASKS,
        "magnitude.masks.safetensors": MASKS,
        "letters.packed.safetensors": PACKED,
        "demo.svg": DEMO_PICTURE,
    }
    return {name: Output.open(context, out / name, kind, {}, force) for name, kind in kinds.items()}


def _drawing(model: torch.nn.Module, methods: Mapping[str, MaskSet], results: Mapping[str, Evaluation]) -> str:
    """The accuracy of all methods, and letters for which masks change the answer."""
    images, _ = letters("test").tensors
    networks = {"dense": model} | {name: halve.apply(model, methods[name]) for name in (MAGNITUDE, "learned")}
    with torch.no_grad():
        answers = torch.stack([network(images).argmax(1) for network in networks.values()], 1)

    changed = (answers[:, 1:] != answers[:, :1]).any(1).nonzero()[:SHOWN, 0].tolist()
    shown = [Letter(((images[i, 0] + 1) / 3).numpy(), [NAMES[answer] for answer in answers[i]]) for i in changed]
    first = next(iter(results.values()))
    accuracy = {"dense": first.dense_top1 or 0.0}
    accuracy |= {name: result.top1 or 0.0 for name, result in results.items() if name != "random"}
    title = f"Accuracy of a 2:4 network on {first.images:,} test letters"
    return picture(title, accuracy, list(networks), shown)


def _show(
    results: Mapping[str, Evaluation], masks: MaskSet, ok: bool, sizes: Mapping[str, int], out: Path, seconds: float
) -> None:
    first = next(iter(results.values()))
    show.table(
        f"A small ResNet on {first.images:,} test letters; {masks.weights:,} weights masked 2:4, none changed",
        ("masks", ">top-1", ">top-5", ">agreement", ">95 % interval", ">mean KL"),
        [row_of("none (dense)", first, dense=True), *(row_of(name, result) for name, result in results.items())],
    )
    one, other = results["learned"], results[MAGNITUDE]
    accuracy = 100 * ((one.top1 or 0) - (other.top1 or 0))
    agreement = 100 * ((one.agreement or 0) - (other.agreement or 0))
    show.say("")
    show.say(
        f"learning instead of recalibrated magnitude: {accuracy:+.1f} points of top-1, {agreement:+.1f} of agreement"
    )
    show.say("")
    for name, count in sizes.items():
        show.say(f"{out / name}  {show.formatted_bytes(count)}")
    show.say(f"verify: {'masks applied, all tensors unchanged' if ok else 'FAILED'}; {seconds:.0f} s in total")
    show.say("")
    show.say(f"Look at {out / 'demo.svg'} in a browser. Next, in {out}:")
    show.say(
        "  halve evaluate net.py:net --weights letters.safetensors --masks letters.masks.safetensors --data letters"
    )
    show.say("  halve inspect letters.masks.safetensors")
