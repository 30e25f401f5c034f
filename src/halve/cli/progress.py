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
from halve.progress import is_watched, known_length


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / max(task.elapsed or 0, 1e-9):.1f}/s", style="dim")


def track(items: Iterable[Any], what: str) -> Iterator[Any]:
    """Yield the items with a progress bar on a terminal; nothing is shown in a log or a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=show.ERR, transient=True, disable=not is_watched()) as progress:
        yield from progress.track(items, total=known_length(items), description=what)


class Learning:
    """Shows learning runs: an estimate, then a bar on a terminal, or a line every 20 seconds in a log."""

    def __init__(self) -> None:
        standing = _Standing(table_column=Column(no_wrap=True, overflow="ellipsis"))  # cut off at the end
        columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), standing)
        self._watched = is_watched()
        self._bar = Progress(*columns, console=show.ERR, transient=True, disable=not self._watched)
        self._task: TaskID | None = None
        self._shown = float("-inf")
        self._which = ""

    def __enter__(self) -> "Learning":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, which: str) -> None:
        """Show another run from now on, and which one that is."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task, self._shown, self._which = None, float("-inf"), f"{which}: "

    def __call__(self, event: Estimate | Report) -> None:
        if isinstance(event, Estimate):
            show.note(f"{self._which}{event}")
            return
        if self._task is None:
            self._task = self._bar.add_task(f"{self._which}learning", total=event.steps, report=event)
        self._bar.update(self._task, completed=event.step, report=event)
        if not self._watched and (event.seconds - self._shown >= 20 or event.step == event.steps):
            self._shown = event.seconds
            of = "" if event.steps is None else f" of {event.steps}"
            show.note(f"{self._which}step {event.step}{of}: {event}")


class _Standing(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["report"]))
