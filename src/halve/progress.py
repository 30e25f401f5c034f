"""Progress for people: one line on standard error, in terminals and notebooks, never in a log."""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")
_EVERY_S = 0.1
_BAR = 20  # characters


def is_first_rank() -> bool:
    """Whether this is the process that reports and writes; under torchrun there are others."""
    return int(os.environ.get("RANK", "0")) == 0


def is_watched() -> bool:
    """Whether standard error is a terminal or a notebook. Under torchrun, only the first process is watched."""
    if not is_first_rank() or sys.stderr is None:
        return False
    return _in_notebook() or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb")


class StatusLine:
    """A line that overwrites itself, at most ten times a second; nothing if nobody is watching."""

    def __init__(self) -> None:
        self._watched = is_watched()
        self._shown_at = float("-inf")
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line."""
        now = time.monotonic()
        if not self._watched or now - self._shown_at < _EVERY_S:
            return
        self._shown_at = now
        text = text[: shutil.get_terminal_size().columns - 1]
        self._write(text.ljust(self._width))
        self._width = len(text)

    def clear(self) -> None:
        """Remove the line."""
        if self._width:
            self._write(" " * self._width)
            self._write("")
        self._width, self._shown_at = 0, float("-inf")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()


def track(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield the items, and show how many are done and how long the rest will take."""
    total = known_length(items)
    line, started = StatusLine(), time.monotonic()
    if not _in_notebook():  # where a line leaves a gap, even if it is gone at once
        line.show(described(what, 0, total, 0.0))
    try:
        for done, item in enumerate(items, 1):
            yield item
            line.show(described(what, done, total, time.monotonic() - started))
    finally:
        line.clear()


def known_length(items: Iterable[Any]) -> int | None:
    """How many items there are; None if that is not known, as for a stream.

    >>> known_length([1, 2]), known_length(iter([1, 2]))
    (2, None)
    """
    try:
        return len(items) if isinstance(items, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset has a __len__ that raises
        return None


def described(what: str, done: int, total: int | None, seconds: float) -> str:
    """Describe how far a loop is.

    >>> described("layers", 5, 20, 10.0)
    'layers [=====>              ] 5/20, 30 s left'
    >>> described("capturing the network", 0, 1, 0.0), described("batches", 40, None, 10.0)
    ('capturing the network ...', 'batches: 40, 4.0 per second')
    """
    if total is None:
        return f"{what}: {done}, {done / max(seconds, 1e-9):.1f} per second"
    if total == 1:
        return f"{what} ..."
    left = f", {duration(seconds / done * (total - done))} left" if done else ""
    return f"{what} {bar(done / max(total, 1))} {done}/{total}{left}"


def bar(share: float) -> str:
    """Draw a bar of a share from 0 to 1.

    >>> bar(0.5)
    '[==========>         ]'
    """
    full = min(int(_BAR * share), _BAR)
    return f"[{'=' * full}{'>' if full < _BAR else ''}{' ' * (_BAR - full - 1)}]"


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(8), duration(75), duration(4000)
    ('8 s', '1 min 15 s', '1 h 6 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _in_notebook() -> bool:
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
