"""halve learn."""

import typing
from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.learning_page import LearningPage
from halve.cli.output import LOG, MASKS, REPORT, RUN_STATE, Output, reads
from halve.cli.signature import derived, with_options
from halve.errors import DataError, FileError, HalveError, LearningError, OptionError
from halve.learn import held_back
from halve.learn.probe import Estimate
from halve.learn.reporting import Report, is_log
from halve.learn.run_state import SUFFIX as LEARNING_SUFFIX
from halve.learn.settings import LearnOptions
from halve.masks.file import SUFFIX
from halve.progress import is_first_rank
from halve.select.select import SelectOptions
from halve.sources.data import Data

# Options of halve.learn that the command line does not have, and why.
PYTHON_ONLY = {
    "forward": "a function",
    "progress": "a function; the command shows its own progress",
    "example": "a batch; the command takes the first one of --data",
}
NO_VALIDATION = "none"
PARTIAL_SUFFIX = f".partial{SUFFIX}"  # of masks from a run that failed
_HINTS = typing.get_type_hints(halve.learn) | typing.get_type_hints(LearnOptions)
_SHARED = {"model", "data", "seed", *SelectOptions.__annotations__}  # written below, as in other commands
_A_FILE = {"report"}  # in Python a function that gets reports; here a page that shows them

BELOW_AGREEMENT = 5  # exit code: masks were written, but agree less than --min-agreement asks for

_TRADED = (  # of the recipe, where there is a budget or a speed target
    *("max_drop", "min_speedup", "drop_metric", "drop_before", "drop", "drop_images"),
    *("left_dense", "left_dense_ms", "relearned", "not_relearned"),
)

_NOTES = {
    "start": "Existing masks are named by their file.",
    "validation": "Named as --data is; 'none' instead of False.",
    "run_state": f"Default: NAME{LEARNING_SUFFIX} beside --out.",
}


@with_options(derived(halve.learn, _HINTS, PYTHON_ONLY.keys() | _SHARED | _A_FILE, _NOTES), after="out")
def learn(
    context: typer.Context,
    model: o.Model,
    data: o.DataPath,
    weights: o.Weights = None,
    out: o.OptionalOut = None,
    recalibrate: Annotated[
        bool, typer.Option(help="Also measure BatchNorm statistics on --data, after learning.")
    ] = False,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Exit with code 5 if the masks agree with the dense network on less than this share of the validation "
            "images, such as 0.9. The masks are written in any case.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a page with the learning curve and the layers, and refresh it while learning."),
    ] = None,
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: o.OptionalOrder = None,
    remainder: o.OptionalRemainder = None,
    kinds: o.Kinds = None,
    plan: o.SpeedPlanOption = None,
    target: o.Target = None,
    classes: o.Classes = None,
    images: o.Images = None,
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
    force: o.Force = False,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Learn masks from images so that the masked network matches the dense one; no labels needed.

    Ctrl-C keeps what was learned, and --resume continues. Under torchrun all processes learn together.

    \b
    halve learn zoo.py:net --weights net.safetensors --data photos/ --minutes 5

    \b
    halve learn zoo.py:net --weights net.safetensors --data photos/ --plan h200.json --target H200

    \b
    halve learn zoo.py:net --weights net.safetensors --data photos/ --max-drop 0.02 --drop-data more/

    \b
    halve learn zoo.py:net --weights new.safetensors --data photos/ --start old.masks.safetensors
    """
    if recalibrate and stream and given["validation"] is None:
        raise OptionError("--recalibrate with --stream needs --validation: images held back from a stream may recur")
    path = out or o.default_masks_path(model, weights)
    state = given.pop("run_state") or path.with_name(path.name.removesuffix(SUFFIX) + LEARNING_SUFFIX)
    log = given["log"]
    inputs = reads(MODEL=model, weights=weights, data=data, classes=classes, drop_data=given["drop_data"])
    inputs |= reads(start=given["start"], validation=given["validation"], plan=plan)
    output = Output.open(context, path, MASKS, inputs | reads(run_state=state, log=log), force)
    Output.open(context, state, RUN_STATE, inputs | reads(log=log), None, option="--run-state")
    if log is not None:
        Output.open(context, log, LOG, inputs, force, option="--log")
        if force and log.is_file() and not is_log(log):
            log.write_bytes(b"")
    page = None
    if report is not None:
        others = inputs | reads(run_state=state, log=log, out=path)
        to = Output.open(context, report, REPORT, others, force, option="--report")
        page = LearningPage(to, model, force, log if given["resume"] else None)
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    reading: dict[str, Any] = {
        "batch": batch,
        "workers": workers,
        "loader": loader,
        "classes_file": classes,
        "relabel": True,
    }
    source = opened.data(data, **reading, limit=images, shuffle=True, seed=seed, stream=stream)
    if min_agreement is not None:
        _check_validation(source, given["validation"])

    given |= {"include": include, "exclude": exclude, "also": also, "order": order, "remainder": remainder}
    given |= {"pattern": o.pattern_rules(pattern) if pattern else None, "kinds": kinds, "seed": seed}
    given |= {"plan": plan, "target": target}
    options = {name: value for name, value in given.items() if value not in (None, [])}  # the rest keeps its defaults
    if "drop_data" in options:
        options["drop_data"] = opened.data(options["drop_data"], **reading).loader
    if "validation" in options:
        none = options["validation"] == NO_VALIDATION
        options["validation"] = False if none else opened.data(options["validation"], **reading).loader
    if "start" in options and _names_a_file(options["start"]):
        options["start"] = halve.load(options["start"])
    try:
        with progress.Learning() as bar:

            def show_event(event: Estimate | Report) -> None:
                bar(event)
                if page is not None:
                    page(event)

            masks = halve.learn(
                opened.model, source.loader, run_state=state, report=show_event, progress=progress.track, **options
            )
        interrupted = masks.recipe["ended"] == "interrupted"
        if recalibrate and not interrupted:
            masks = _recalibrated(opened, masks, source.loader, options.get("validation"), seed)
    except LearningError as error:
        if page is not None:
            page.failed(str(error))
        if not isinstance(error.masks, halve.MaskSet) or not is_first_rank():
            raise
        partial = path.with_name(path.name.removesuffix(SUFFIX) + PARTIAL_SUFFIX)
        try:
            learned = error.masks
            Output.open(context, partial, MASKS, inputs, force).write(lambda path: learned.save(path, force=force))
        except FileError as again:
            raise LearningError(f"{error}; the masks learned so far were not saved: {again}", error.masks) from error
        unchanged = f"; {path} is unchanged" if path.exists() else ""
        saved = f"the masks learned so far were saved to {partial}{unchanged}"
        raise LearningError(f"{error}; {saved}", error.masks) from error
    if is_first_rank():
        finished = masks.with_recipe(source=opened.source.spec, weights=opened.source.weights, data=data)
        output.write(lambda path: finished.save(path, force=force))
        if page is not None:
            page.finished(path, finished, plan)
        if interrupted:
            learned = masks.recipe["quality"].get("returned", "learned") == "learned"
            held = "the masks learned so far" if learned else "one-shot masks, better than those learned so far"
            show.note(f"{path} holds {held}; the same command with --resume continues from {state}")
        else:
            state.unlink(missing_ok=True)
            _show(masks, path, json, searched=not isinstance(options.get("start"), halve.MaskSet))
    if interrupted:
        raise typer.Exit(130)
    if min_agreement is not None:
        _check_agreement(masks, min_agreement)


def _names_a_file(start: str) -> bool:
    """Whether --start names a mask file, which may not exist, and not a score."""
    path = Path(start)
    return path.is_file() or bool(path.suffix) or path.name != start


def _check_validation(source: Data, validation: str | None) -> None:
    """Raise if there will be no images to measure agreement on."""
    too_few = source.images is not None and not held_back.count(source.images)
    if validation == NO_VALIDATION or (validation is None and too_few):
        raise DataError(
            f"--min-agreement needs images to measure on: pass --validation, or --data with at least "
            f"{held_back.TOO_FEW} images, got {source.images}"
        )


def _check_agreement(masks: halve.MaskSet, least: float) -> None:
    """Exit with code 5 if masks agree less with the dense network than was asked for."""
    agreement = masks.recipe["quality"].get("agreement")
    if agreement is not None and agreement >= least:
        return
    if is_first_rank():
        found = "is unknown: the outputs are not class scores" if agreement is None else f"is {show.percent(agreement)}"
        show.fail(f"agreement with the dense network {found}; --min-agreement asks for {show.percent(least)}")
    raise typer.Exit(BELOW_AGREEMENT)


def _recalibrated(opened: o.Opened, masks: halve.MaskSet, batches: Any, validation: Any, seed: int) -> halve.MaskSet:
    """The masks with recalibrated statistics, judged again; an error keeps those that were learned."""
    quality, split = masks.recipe["quality"], None
    if validation is None:
        split = held_back.hold_back(batches, seed)  # the same images as before
    try:
        result = halve.recalibrate(opened.model, masks, split.data if split else batches, progress=progress.track)
        if quality.get("agreement") is None:
            return result.with_recipe(quality={"unknown": "recalibrated since it was measured"})
        images = split.held_back if split else held_back.chosen_from(validation, seed)
        found = halve.evaluate(opened.model, result, held_back.first(images, quality["images"]))
    except HalveError as error:
        raise LearningError(f"{error}; the masks as learned are in the error's .masks", masks) from error
    now: dict[str, Any] = {"agreement": found.agreement, "kl": found.kl, "output_error": None, "recalibrated": True}
    known = found.agreement_interval is not None and not quality.get("no_interval")
    now["agreement_interval"] = list(found.agreement_interval or ()) if known else None
    return result.with_recipe(quality=quality | now)


def _show(masks: halve.MaskSet, path: Path, json: bool, searched: bool) -> None:
    """Print the result. Without a search, the masks keep the channel orders of those that learning started from."""
    recipe = masks.recipe
    if not searched:
        recipe["permute"] = None
    if json:
        keys = ("quality", "steps_done", "seconds", "ended", "permute", "not_permuted", "estimated", *_TRADED)
        about = {key: recipe[key] for key in keys if recipe.get(key) is not None}
        show.as_json(show.described(masks, path) | about)
        return
    if recipe["permute"]:
        show.permuted(recipe["permute"])
    elif recipe.get("not_permuted"):
        show.note(f"note: no channel orders: {recipe['not_permuted']}")
    show.idle(masks)
    show.say(f"{show.saved(masks, path)}; {recipe['steps_done']} steps in {recipe['seconds']:.0f} s")
    if "drop" in recipe:
        _show_traded(recipe)
    if "estimated" in recipe:
        show.say(_estimate(recipe["estimated"]))
    show.quality(recipe)


def _estimate(found: dict[str, Any]) -> str:
    """The estimated speed of the network, in one line.

    >>> _estimate({"ms": 3.63, "speedup": 1.73, "device": "NVIDIA H200", "dtype": "float16", "batch": 256})
    'estimated 3.63 ms, 1.73 x as fast as dense, on NVIDIA H200, float16, batch 256'
    """
    time = f"{found['ms']:.{2 if found['ms'] >= 1 else 4}f} ms"
    where = f"on {found['device']}, {found['dtype']}, batch {found['batch']}"
    return f"estimated {time}, {found['speedup']:.2f} x as fast as dense, {where}"


def _show_traded(recipe: dict[str, Any]) -> None:
    """Print which layers a budget or a speed target leaves dense, and what the others cost."""
    drop = f"drop of {show.percent(recipe['drop'])} on {recipe['drop_images']:,} images"
    if not recipe["left_dense"]:
        show.say(f"{drop}; no layer is left dense")
        return
    columns, saved = ["layer", ">cost (KL)"], recipe.get("left_dense_ms")
    rows = [[name, f"{cost:.4f}"] for name, cost in recipe["left_dense"].items()]
    if saved is not None:
        columns.append(">ms that a mask would save")
        rows = [[*row, f"{saved[row[0]]:.4f}"] for row in rows]
    show.table(f"left dense, for a {drop}", columns, rows)
    if "relearned" in recipe:
        show.say(f"the other layers were learned again, for {recipe['relearned']} steps")
    else:
        show.note(f"note: the other layers were not learned again: {recipe['not_relearned']}")
