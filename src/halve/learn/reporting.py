"""What a learning run tells while it runs: to a function, to a JSONL file, to trackers; from the first rank alone."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from halve.errors import FileError
from halve.learn.distributed import Ranks
from halve.learn.probe import Estimate

_TRACKED = ("loss", "entropy", "changed", "lr", "images_per_s")


@dataclass(frozen=True)
class Report:
    """How learning stands after a step; the shares are from 0 to 1."""

    step: int
    steps: int | None
    loss: float
    entropy: float
    changed: float
    lr: float
    temperature: float
    noise: float
    guidance: float
    images_per_s: float
    seconds: float
    seconds_left: float


class Reporter:
    """Passes reports on."""

    def __init__(self, ranks: Ranks, tell: Callable[[Estimate | Report], None] | None, log: str | Path | None) -> None:
        self._ranks, self._tell, self._log = ranks, tell, log
        self._file: IO[str] | None = None

    @contextmanager
    def open(self, config: Mapping[str, Any], append: bool) -> Iterator[None]:
        """Trackers and the log, for as long as the run lasts; both are closed also when it fails."""
        self._ranks.start_trackers(config)
        try:
            with self._opened(append) as self._file:
                yield
        finally:
            self._ranks.stop_trackers()

    def _opened(self, append: bool) -> AbstractContextManager[IO[str] | None]:
        if self._log is None or not self._ranks.first:
            return nullcontext()
        try:
            return Path(self._log).open("a" if append else "w")
        except OSError as error:
            raise FileError(f"cannot write the log {self._log}: {error.strerror}") from error

    def tell(self, event: Estimate | Report, keep: bool = False) -> None:
        """Pass an event on; `keep` also writes it to log and trackers."""
        if not self._ranks.first:
            return
        if self._tell is not None:
            self._tell(event)
        if keep and isinstance(event, Report):
            values = asdict(event)
            self._ranks.track({key: values[key] for key in _TRACKED}, event.step)
            if self._file is not None:
                self._file.write(json.dumps(values) + "\n")
                self._file.flush()
