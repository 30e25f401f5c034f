"""What a person sees: tables and JSON on standard output, progress and notes on standard error."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_out, _err = Console(), Console(stderr=True)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / max(task.elapsed or 0, 1e-9):.1f}/s", style="dim")


def track(items: Iterable[Any], what: str) -> Iterator[Any]:
    """The items, with a progress bar on standard error; a terminal sees it live, a log sees its end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=_err, transient=_err.is_terminal) as progress:
        yield from progress.track(items, total=len(items) if isinstance(items, Sized) else None, description=what)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns whose name starts with '>' are aligned to the right."""
    grid = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        grid.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    # A log or a pipe gets whole lines; only a terminal folds.
    out = _out if _out.is_terminal else Console(width=1000)
    out.print(Text(title, style="bold"), soft_wrap=True)
    out.print(grid)


def as_options(text: str) -> str:
    """A message of the library in the words of the command line.

    >>> as_options("classifier head (also='fc' masks it), or classes= maps labels")
    'classifier head (--also fc masks it), or --classes maps labels'
    """
    names = "also|include|exclude|remainder|order|pattern|changed|classes|data|max_drop|drop_data|resume|checkpoint"
    text = re.sub(rf"\b({names})='([^']*)'", lambda m: f"--{m[1].replace('_', '-')} {m[2]}", text)
    return re.sub(rf"\b({names})=(True)?", lambda m: f"--{m[1].replace('_', '-')}", text)


def say(text: str) -> None:
    """A line for the person, on standard output."""
    _out.print(Text(text), soft_wrap=True)


def note(text: str) -> None:
    """A remark beside the result, on standard error."""
    _err.print(Text(as_options(text)), style="yellow", soft_wrap=True)


def fail(text: str) -> None:
    """Why it did not work, on standard error."""
    _err.print(Text(f"error: {as_options(text)}"), style="red", soft_wrap=True)


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
