"""halve verify."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import halve
from halve.check.verification import COLUMNS, LayerCheck, Status, TensorCheck
from halve.cli import options as o
from halve.cli import show
from halve.errors import OptionError

EXIT_CODES: dict[Status, int] = {"ok": 0, "changed": 1, "failed": 1, "not applied": 3, "unknown": 4}


def verify(
    model: o.Model,
    masks: o.OptionalMasks = None,
    weights: o.Weights = None,
    on_changed: Annotated[
        str, typer.Option(help="Whether changed tensors 'fail', or are an intended update to 'accept'.")
    ] = "fail",
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: o.OrderOption = "channels",
    remainder: o.Remainder = "skip",
    json: o.Json = False,
) -> None:
    """Check that a checkpoint has its masks applied, that nothing else changed, and which hardware can use it.

    Every masked layer must be N:M in place, and all tensors must be those that the masks were made for, bit for bit or
    as a cast. Without --masks, only N:M is checked.

    Exit codes: 0 ok, 1 a check failed or tensors changed, 2 bad input, 3 the masks fit but are not applied (a dense
    checkpoint), 4 unknown (masks without digests).

    \b
    halve verify zoo.py:net --weights sparse.safetensors --masks net.masks.safetensors
    """
    opened = o.open_model(model, weights, "cpu")
    if masks is not None:
        if pattern or include or exclude or also or order != "channels" or remainder != "skip":
            raise OptionError("--masks decides which layers are checked: leave out the options that select layers")
        outcome = halve.verify(opened.model, halve.load(masks), on_changed=on_changed)  # type: ignore[arg-type]
    else:
        selection = o.selection(pattern, include, exclude, also, order, remainder)
        outcome = halve.verify(opened.model, on_changed=on_changed, **selection)  # type: ignore[arg-type]
    if json:
        facts = {name: getattr(outcome, name) for name in ("ok", "status", "failures", "casts", "unchecked", "moved")}
        facts["accepted"] = {name: _finite(size) for name, size in outcome.accepted.items()}
        show.as_json(
            facts | {"layers": list(map(_plain, outcome.layers)), "tensors": list(map(_plain, outcome.tensors))}
        )
    else:
        show.table(model, COLUMNS, [layer.cells() for layer in outcome.layers])
        for note in outcome.notes:
            show.say(note)
        for name, failure in outcome.failures.items():
            if outcome.status != "not applied":  # the table shows it
                show.fail(f"{name}: {failure}")
        if not outcome.layers:
            show.fail("no layer to check")
        show.say(f"{outcome.status}: {outcome.summary}")
        if outcome.has_next or (masks is None and outcome.ok):
            show.say(f"next: {_next_command(outcome.status, model, weights, masks)}")
    if not outcome.ok:
        raise typer.Exit(EXIT_CODES[outcome.status])


def _plain(check: LayerCheck | TensorCheck) -> dict[str, Any]:
    """The outcome for a layer or a tensor as JSON values."""
    values = asdict(check) | {"cast": None if check.cast is None else str(check.cast).removeprefix("torch.")}
    if isinstance(check, LayerCheck):
        values |= {"pattern": str(check.pattern), "update": _finite(check.update)}
    return values


def _finite(size: float | None) -> float | None:
    return size if size is not None and math.isfinite(size) else None


def _next_command(status: Status, model: str, weights: Path | None, masks: Path | None) -> str:
    given = [model, *(["--weights", str(weights)] if weights is not None else [])]
    if masks is None:
        return f"halve verify {shlex.join(given)} --masks FILE also compares the tensors"
    common = shlex.join([*given, "--masks", str(masks)])
    name = Path(weights or model.rpartition(":")[2]).name.partition(".")[0]
    dense = shlex.join([model, "--weights", "DENSE", "--masks", str(masks)])
    return {
        "ok": f"halve compile {common} --out {shlex.quote(name)}.compiled.safetensors",
        "changed": f"halve verify {common} --on-changed accept, if the update is intended",
        "not applied": f"halve apply {common} --out {shlex.quote(name)}.sparse.safetensors",
        "unknown": f"halve learn or halve prune {shlex.join(given)}, whose masks say which model they were made for",
        "failed": f"halve apply {dense} --out FILE, with the checkpoint that the masks were made for",
    }[status]
