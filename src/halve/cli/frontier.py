"""halve frontier."""

import contextlib
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.cli import options as o
from halve.cli import progress, show
from halve.cli.frontier_picture import picture
from halve.cli.output import FRONTIER_PICTURE, MASKS, Output, reads
from halve.cli.signature import derived, documented, with_options
from halve.errors import HalveError, listed
from halve.learn.frontier import COLUMNS, POINTS, Frontier, Point, Start
from halve.learn.probe import Estimate
from halve.learn.reporting import Report
from halve.learn.settings import LearnOptions
from halve.masks.file import SUFFIX
from halve.masks.storage import write_atomically
from halve.progress import is_first_rank
from halve.select.speed_plan import load_plan

MARK = "frontier"  # recipe entry of the masks that this command writes
_OPTIONS = {"permute", "permute_seconds", "fallback", "norms", "precision"}  # those of halve.learn
_HINTS = typing.get_type_hints(halve.learn) | typing.get_type_hints(LearnOptions)
_NOTES = {"fallback": "Only the first point is compared with one-shot masks."}


@with_options(derived(halve.learn, _HINTS, documented(halve.learn).keys() - _OPTIONS, _NOTES), after="steps")
def frontier(
    context: typer.Context,
    model: o.Model,
    data: o.DataPath,
    plan: Annotated[Path, typer.Option(help="File of 'halve measure' from the machine that the network will run on.")],
    weights: o.Weights = None,
    name: Annotated[
        Path | None, typer.Option(help="Start of the names of the files to write (default: NAME of the checkpoint).")
    ] = None,
    points: Annotated[int, typer.Option(min=1, help="Number of mask files.")] = POINTS,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time for the first point; each other one takes a quarter (default: 2).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps instead of minutes.")] = None,
    validation: Annotated[
        str | None,
        typer.Option(
            help="Images to measure agreement on, named as --data is; by default some of --data are held back."
        ),
    ] = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    target: o.Target = None,
    images: o.Images = None,
    batch: o.Batch = 64,
    seed: o.Seed = 0,
    size: o.Size = None,
    resize: o.Resize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    workers: o.Workers = None,
    loader: o.LoaderOption = "pillow",
    device: o.Device = "auto",
    force: o.Force = False,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Learn masks at several speeds, from the fastest network to the most accurate one, and plot them.

    The first point masks every layer that is worth it by --plan; the others leave those dense whose masks save the
    fewest milliseconds for their cost. Writes NAME.1.masks.safetensors and so on, and NAME.frontier.svg, as soon as a
    point is finished; files of an earlier frontier of that name are removed. Ctrl-C keeps the points that are finished.

    \b
    halve frontier zoo.py:net --weights net.safetensors --data photos/ --plan h200.json --target H200
    """
    start = name or o.default_masks_path(model, weights)
    start = start.with_name(start.name.removesuffix(SUFFIX))
    inputs = reads(MODEL=model, weights=weights, data=data, plan=plan, validation=validation)
    files = _Files(context, start, points, inputs, model, force)
    opened = o.open_model(model, weights, device, size, resize, mean, std)
    reading: dict[str, Any] = {"batch": batch, "workers": workers, "loader": loader, "relabel": True}
    source = opened.data(data, **reading, limit=images, shuffle=True, seed=seed)
    given |= {"minutes": minutes, "steps": steps, "target": target, "seed": seed}
    given |= {"include": include, "exclude": exclude, "also": also}
    options = {key: value for key, value in given.items() if value not in (None, [])}
    if validation is not None:
        options["validation"] = opened.data(validation, **reading).loader
    speeds = load_plan(plan)
    made: list[Point] = []

    with progress.Learning() as bar:

        def show_event(event: Start | Estimate | Report | Point) -> None:
            if isinstance(event, Start):
                bar.begin(str(event))
            elif isinstance(event, Point):
                made.append(event)
                masks = event.masks.with_recipe(source=opened.source.spec, weights=opened.source.weights, data=data)
                files.write(masks, Frontier(made, speeds))
            else:
                bar(event)

        try:
            found = halve.frontier(
                opened.model,
                source.loader,
                speeds,
                points=points,
                report=show_event,
                progress=progress.track,
                **options,
            )
        except HalveError:
            if files.written:
                show.note(f"note: finished before the error: {listed(files.written)}")
            raise
    if is_first_rank():
        _show(found, files, model, plan, json)
    if found.interrupted:
        raise typer.Exit(130)


class _Files:
    """The files of a frontier: NAME.1.masks.safetensors and so on, and the plot."""

    def __init__(self, context: typer.Context, start: Path, points: int, inputs: Any, model: str, force: bool) -> None:
        self._start, self._model, self._force = start, model, force
        self._outputs = [
            Output.open(context, self._path(number), MASKS, inputs, force, option="--name")
            for number in range(1, points + 1)
        ]
        plot = start.with_name(f"{start.name}.frontier.svg")
        self._plot = Output.open(context, plot, FRONTIER_PICTURE, inputs, force, option="--name")
        own = {output.path for output in self._outputs}
        self._old = [path for path in self._numbered() if _is_point(path)]
        for path in self._old:
            if path not in own:
                Output.open(context, path, MASKS, inputs, None, option="--name")
        self.written: list[Path] = []

    @property
    def plot(self) -> Path:
        """The plot."""
        return self._plot.path

    def write(self, masks: halve.MaskSet, frontier: Frontier) -> None:
        """Write the masks of the last point, and the plot of all so far. The first one replaces an older frontier."""
        if not is_first_rank():
            return
        number = len(frontier)
        marked = masks.with_recipe(**{MARK: {"point": number}})
        path = self._outputs[number - 1].write(lambda to: marked.save(to, force=self._force))
        if number == 1:
            for old in self._old:
                if old != path:
                    old.unlink(missing_ok=True)
        self.written.append(path)
        drawn = picture(frontier, f"{self._model}: {frontier.measured_on}, against time")
        self._plot.write(lambda to: write_atomically(to, drawn.encode()))

    def _path(self, number: int) -> Path:
        return self._start.with_name(f"{self._start.name}.{number}{SUFFIX}")

    def _numbered(self) -> Iterable[Path]:
        """The files whose names are those of points."""
        name = re.compile(rf"{re.escape(self._start.name)}\.[1-9]\d*{re.escape(SUFFIX)}")
        with contextlib.suppress(OSError):  # opening the outputs says what is wrong with the folder
            return sorted(path for path in self._start.parent.iterdir() if name.fullmatch(path.name))
        return []


def _is_point(path: Path) -> bool:
    """Whether a file was written by this command."""
    try:
        return MARK in halve.load(path).recipe
    except HalveError:
        return False


def _show(found: Frontier, files: _Files, model: str, plan: Path, json: bool) -> None:
    if json:
        facts = [
            {
                "file": str(path),
                "layers": len(p.masks),
                "ms": p.ms,
                "speedup": p.speedup,
                "agreement": p.agreement,
                "agreement_interval": p.agreement_interval,
                "images": p.images,
                "kl": p.kl,
            }
            for path, p in zip(files.written, found, strict=True)
        ]
        show.as_json(
            {
                "points": facts,
                "interrupted": found.interrupted,
                "dense_ms": found.plan.dense_ms,
                "unmasked_ms": found.plan.unmasked_ms,
                "plot": str(files.plot),
            }
        )
        return
    rows = [(path.name, *point.cells()) for path, point in zip(files.written, found, strict=True)]
    heads = ("file", *(f">{column}" for column in COLUMNS))
    show.table(f"{model} on {found.plan.device}, batch {found.plan.batch}; {found.measured_on}", heads, rows)
    show.say(found.plan.summary)
    show.say(f"{files.plot} shows them; times are estimates from {plan}, 'halve bench' measures them")
