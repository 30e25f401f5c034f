"""What a person reads: tables and JSON on standard output, notes and errors on standard error."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halve.errors import listed

_OPTIONS = (
    "accumulate|also|alpha|on_changed|checkpoint|classes|data|drop_data|drop_metric|dtype|epochs|exclude|features|include|"
    "augment|lr|match|max_drop|minutes|noise|objective|order|pattern|permute|permute_seconds|precision|preset|remainder|"
    "resume|seed|start|steps|temperature"
)
OUT, ERR = Console(), Console(stderr=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns whose name starts with '>' are aligned to the right."""
    grid = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        grid.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    # A log or a pipe gets whole lines; only a terminal folds.
    out = OUT if OUT.is_terminal else Console(width=1000)
    out.print(Text(title, style="bold"), soft_wrap=True)
    out.print(grid)


def as_options(text: str) -> str:
    """A message of the library in the words of the command line.

    >>> as_options("classifier head (also='fc' masks it); classes= maps labels, max_drop=0.01 or resume=True")
    'classifier head (--also fc masks it); --classes maps labels, --max-drop 0.01 or --resume'
    """

    def option(match: re.Match[str]) -> str:
        value = match["quoted"] or match["bare"] or ""
        name = f"--{match['name'].replace('_', '-')}"
        return name if value in ("", "True") else f"{name} {value}"

    return re.sub(rf"\b(?P<name>{_OPTIONS})=(?:'(?P<quoted>[^']*)'|(?P<bare>[\w.-]+))?", option, text)


def say(text: str) -> None:
    """A line for the person, on standard output."""
    OUT.print(Text(text), soft_wrap=True)


def note(text: str) -> None:
    """A remark beside the result, on standard error."""
    ERR.print(Text(as_options(text)), style="yellow", soft_wrap=True)


def fail(text: str) -> None:
    """Why it did not work, on standard error."""
    ERR.print(Text(f"error: {as_options(text)}"), style="red", soft_wrap=True)


def as_json(value: Any) -> None:
    """Machine-readable result on standard output."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def percent(share: float | None, digits: int = 2) -> str:
    """A share for a table: 71.20 %, or a dash."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def size(count: int) -> str:
    """A file's size for a person.

    >>> size(2_345_678)
    '2.35 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def permuted(summary: Mapping[str, Any]) -> None:
    """What reordering channels gained."""
    kept = f"{percent(summary['kept_before'])} -> {percent(summary['kept_after'])}"
    layers = f"{summary['layers']} layer{'' if summary['layers'] == 1 else 's'}"
    if summary["layers"]:
        say(f"channel orders for {layers}; kept of what they were searched by: {kept}, in {summary['seconds']} s")
    else:
        say("channel orders: none that keeps more")
    if summary["not_whole"]:
        note(f"note: the network could be captured in parts only: {summary['not_whole']}")
    if summary["not_run"]:
        note(
            f"note: {listed(summary['not_run'])} did not run and will not fit channels that apply --permute moves: "
            f"for inference only"
        )
    if not summary["finished"]:
        note("note: the search ran out of time; --permute-seconds gives it more")
    if summary["fixed"]:
        name, why = next(iter(summary["fixed"].items()))
        count = len(summary["fixed"])
        who = "1 layer keeps its order," if count == 1 else f"{count} layers keep their order, such as"
        note(f"note: {who} {name}: {why}")
