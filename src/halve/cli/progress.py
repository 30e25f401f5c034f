"""Progress bars and status lines, on standard error."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from halve.cli import show
from halve.learn.probe import Estimate
from halve.learn.reporting import Report
from halve.progress import known_length


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / max(task.elapsed or 0, 1e-9):.1f}/s", style="dim")


def track(items: Iterable[Any], what: str) -> Iterator[Any]:
    """Yield the items with a progress bar: live on a terminal, its final state in a log."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=show.ERR, transient=show.ERR.is_terminal) as progress:
        yield from progress.track(items, total=known_length(items), description=what)


class Learning:
    """Shows a learning run: an estimate, then a bar on a terminal, or a line every 20 seconds in a log."""

    def __init__(self) -> None:
        standing = _Standing(table_column=Column(no_wrap=True, overflow="ellipsis"))  # cut off at the end
        columns = (TextColumn("learning"), BarColumn(16), MofNCompleteColumn(), standing)
        self._bar = Progress(*columns, console=show.ERR, transient=True, disable=not show.ERR.is_terminal)
        self._task: TaskID | None = None
        self._shown = float("-inf")

    def __enter__(self) -> "Learning":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, event: Estimate | Report) -> None:
        if isinstance(event, Estimate):
            show.note(str(event))
            return
        if self._task is None:
            self._task = self._bar.add_task("learning", total=event.steps, report=event)
        self._bar.update(self._task, completed=event.step, report=event)
        if not show.ERR.is_terminal and (event.seconds - self._shown >= 20 or event.step == event.steps):
            self._shown = event.seconds
            of = "" if event.steps is None else f" of {event.steps}"
            show.note(f"step {event.step}{of}: {event}")


class _Standing(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["report"]))
