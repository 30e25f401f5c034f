"""Output for people and programs: tables and JSON on standard output, notes and errors on standard error."""

import functools
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halve.cli.app import COMMANDS, command, running
from halve.errors import listed
from halve.masks.mask import MaskSet
from halve.select.select import NOT_RUN
from halve.text import formatted_bytes as formatted_bytes
from halve.text import interval as interval
from halve.text import printable as printable

OUT, ERR = Console(), Console(stderr=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns whose name starts with '>' are right-aligned."""
    grid = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        grid.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    # fold lines on a terminal only, not in a log or a pipe
    out = OUT if OUT.is_terminal else Console(width=1000)
    out.print(Text(printable(title), style="bold"), soft_wrap=True)
    out.print(grid)


def as_options(text: str) -> str:
    """Return a message of the library in the words of the command line.

    Options that the running command does not have keep their Python names. Values are quoted where a shell needs it.

    >>> as_options("output head (also='fc' masks it); classes= maps labels, max_drop=0.01 or resume=True")
    'output head (--also fc masks it); --classes maps labels, --max-drop 0.01 or --resume'
    >>> as_options("permute=False or validation=False")
    '--no-permute or --validation none'
    >>> as_options("pass target='NVIDIA H200'")
    "pass --target 'NVIDIA H200'"
    """
    known = _option_names(running.get())
    if not known:
        return text

    def option(match: re.Match[str]) -> str:
        value = match["quoted"] or match["bare"] or ""
        name = f"--{match['name'].replace('_', '-')}"
        if value == "False":
            return f"--no-{name[2:]}" if f"no_{match['name']}" in known else f"{name} none"
        return name if value in ("", "True") else f"{name} {shlex.quote(value)}"

    names = "|".join(sorted(known, key=len, reverse=True))  # longer names match first
    return re.sub(rf"\b(?P<name>{names})=(?:'(?P<quoted>[^']*)'|(?P<bare>[\w.-]+))?", option, text)


@functools.cache
def _option_names(of: str | None) -> frozenset[str]:
    """The names of the options of a command, or of all commands, as Python spells them."""
    options = [option for name in ([of] if of in COMMANDS else COMMANDS) for option in command(name).params]
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    return frozenset(flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--"))


def say(text: str) -> None:
    """Print a line on standard output."""
    OUT.print(Text(printable(text)), soft_wrap=True)


def note(text: str) -> None:
    """Print a note or a warning on standard error."""
    ERR.print(Text(printable(as_options(text))), style="yellow", soft_wrap=True)


def fail(text: str) -> None:
    """Print an error on standard error."""
    ERR.print(Text(printable(f"error: {as_options(text)}")), style="red", soft_wrap=True)


def as_json(value: Any) -> None:
    """Print a result as JSON on standard output."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def percent(share: float | None, digits: int = 2) -> str:
    """Format a share: 71.20 %, or a dash if there is none."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def described(masks: MaskSet, path: Path) -> dict[str, Any]:
    """Describe a mask file that was written, for JSON."""
    about = {"file": str(path), "layers": len(masks), "weights": masks.weights, "density": masks.density}
    return about | {"not_masked": {name: as_options(why) for name, why in masks.recipe["not_masked"].items()}}


def saved(masks: MaskSet, path: Path) -> str:
    """Describe a mask file that was written, in one line."""
    return (
        f"{path}: {len(masks)} layers, {masks.weights:,} weights, {percent(masks.density, 1)} kept, "
        f"{formatted_bytes(path.stat().st_size)} on disk"
    )


def idle(masks: MaskSet) -> None:
    """Print which layers are not masked since they never ran."""
    if names := [name for name, reason in masks.recipe["not_masked"].items() if reason.startswith(NOT_RUN)]:
        note(f"note: not masked, as they {NOT_RUN}: {listed(names)}; also= masks them")


def permuted(summary: Mapping[str, Any]) -> None:
    """Print what a search for channel orders found."""
    kept = f"{percent(summary['kept_before'])} -> {percent(summary['kept_after'])}"
    layers = f"{summary['layers']} layer{'' if summary['layers'] == 1 else 's'}"
    if summary["layers"]:
        say(f"channel orders for {layers}: share of the score that is kept {kept}, in {summary['seconds']} s")
    else:
        say("channel orders: none found that keeps more")
    if summary["not_whole"]:
        note(f"note: only parts of the network could be captured: {summary['not_whole']}")
    if summary["not_run"]:
        note(
            f"note: {listed(summary['not_run'])} did not run, so its channels do not move with 'apply --permute': "
            f"use the result for inference only"
        )
    if not summary["finished"]:
        note("note: the search ran out of time; raise --permute-seconds to search longer")
    if summary["fixed"]:
        name, why = next(iter(summary["fixed"].items()))
        count = len(summary["fixed"])
        who = "1 layer keeps its order," if count == 1 else f"{count} layers keep their order, such as"
        note(f"note: {who} {name}: {why}")


def quality(recipe: Mapping[str, Any]) -> None:
    """Print how far masks agree with the dense network, and the masks that they were compared with.

    A recipe may come from a file that someone else wrote, and hold anything.
    """
    found = recipe.get("quality")
    if not isinstance(found, Mapping):
        return
    if "unknown" in found:
        say(f"agreement with the dense network: unknown ({found['unknown']})")
        return
    returned, one_shot, learned = found.get("returned"), found.get("one_shot"), found.get("learned")
    rows = [(f"these masks ({'learned' if returned == 'learned' else f'one-shot, {returned}'})", *_qualities(found))]
    if returned != "learned" and isinstance(learned, Mapping):
        rows.append(("learned", *_qualities(learned)))
    elif returned == "learned" and isinstance(one_shot, Mapping):
        rows.append((f"one-shot, {one_shot.get('score')}", *_qualities(one_shot)))
    title = f"compared with the dense network on {found.get('images')} validation images ({found.get('source')})"
    table(title, ("", ">agreement", ">mean KL", ">output error", ">95 % interval of agreement"), rows)
    if found.get("no_interval"):
        say(as_options(f"no interval: {found['no_interval']}"))


def _qualities(found: Any) -> tuple[str, ...]:
    values = [found.get(key) if isinstance(found, Mapping) else None for key in ("agreement", "kl", "output_error")]
    agreement, kl, error = (value if isinstance(value, int | float) else None for value in values)
    ends = found.get("agreement_interval") if isinstance(found, Mapping) else None
    return percent(agreement), "-" if kl is None else f"{kl:.4f}", percent(error), interval(ends)
