"""Reports of a learning run: to a function, a JSONL file and trackers, from the main process only."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from halve.errors import FileError
from halve.learn.distributed import Processes
from halve.learn.probe import Estimate
from halve.progress import StatusLine, bar, duration

_TRACKED = ("loss", "entropy", "changed", "lr", "images_per_s")


@dataclass(frozen=True)
class Report:
    """The state of a run after a step."""

    step: int
    steps: int | None  # None if the budget is in minutes
    loss: float
    entropy: float  # of the logits, from 0 (decided) to 1
    changed: float  # share of blocks whose choice differs from the initial one
    lr: float
    temperature: float
    noise: float
    guidance: float
    images_per_s: float
    seconds: float
    seconds_left: float
    agreement: float | None = None  # with the dense network on images held back, whenever it was measured

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, {duration(self.seconds_left)} left, changed {self.changed:.1%}, "
            f"{self.images_per_s:.0f} images/s, entropy {self.entropy:.2f}"
        )


def check_log(path: str | Path) -> None:
    """Raise `FileError` if a log would replace a file that is not a log."""
    try:
        other = Path(path).is_file() and Path(path).stat().st_size and not is_log(Path(path))
    except OSError as error:
        raise FileError(f"cannot write the log {path}: {error.strerror}") from error
    if other:
        raise FileError(
            f"cannot write the log {path}: the file exists and is not a log of 'halve learn'; choose another"
        )


def is_log(path: Path) -> bool:
    """Whether a file is the log of a run."""
    with path.open("rb") as log:
        line = log.readline(1 << 16)
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"step", "loss"} <= first.keys()


class Reporter:
    """Sends events to the user's function, the log and the trackers. Without a function they are shown."""

    def __init__(
        self,
        processes: Processes,
        report: Callable[[Estimate | Report], None] | None,
        log: str | Path | None,
        show: bool = False,
    ) -> None:
        self._line = StatusLine() if show and report is None else None
        self._processes, self._report, self._log = processes, report, log
        self._file: IO[str] | None = None
        self._replaces = False  # whether the log still holds the lines of an earlier run

    @contextmanager
    def open(self, config: Mapping[str, Any], append: bool) -> Iterator[None]:
        """Keep the log and the trackers open for the run, and close them even if it fails."""
        self._processes.start_trackers(config)
        try:
            with self._opened() as self._file:
                self._replaces = self._file is not None and not append and Path(self._file.name).is_file()
                yield
        finally:
            if self._line is not None:
                self._line.clear()
            self._processes.stop_trackers()

    @contextmanager
    def _opened(self) -> Iterator[IO[str] | None]:
        if self._log is None or not self._processes.is_main:
            yield None
            return
        try:
            file = Path(self._log).open("a")  # noqa: SIM115  # closed below
        except OSError as error:
            raise FileError(f"cannot write the log {self._log}: {error.strerror}") from error
        try:
            yield file
        finally:
            with suppress(OSError):  # lines are flushed one by one: what is left could not be written
                file.close()

    def send(self, event: Estimate | Report, keep: bool = False) -> None:
        """Report an event; with `keep` also to the log and the trackers."""
        if not self._processes.is_main:
            return
        if self._report is not None:
            self._report(event)
        elif self._line is not None and isinstance(event, Report):
            share = event.seconds / max(event.seconds + event.seconds_left, 1e-9)
            self._line.show(f"learning {bar(share)} step {event.step}, {event}")
        elif self._line is not None:
            self._line.show(f"learning ... {event}")
        if keep and isinstance(event, Report):
            values = asdict(event)
            self._processes.track({key: values[key] for key in _TRACKED}, event.step)
            self._write(json.dumps(values) + "\n")

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            if self._replaces:
                self._file.truncate(0)
                self._replaces = False
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise FileError(f"cannot write the log {self._log}: {error.strerror}") from error
