"""The page that 'halve learn --report' writes: refreshed while masks are learned, complete at the end."""

import time
from pathlib import Path

import halve
from halve.cli import show
from halve.cli.output import Output
from halve.errors import FileError
from halve.learn.probe import Estimate
from halve.learn.reporting import Report
from halve.progress import is_first_rank
from halve.report.curve import history_of
from halve.report.page import Page
from halve.report.report import while_learning

_EVERY = 5.0  # seconds


class LearningPage:
    """Writes the page of a run.

    Args:
        output: The file.
        network: The name of the network.
        force: Whether to replace a file that is no page.
        log: The log of the run that is resumed, whose reports come first.
    """

    def __init__(self, output: Output, network: str, force: bool, log: Path | None) -> None:
        self._output, self._force = output, force
        self._network = network.rpartition(":")[2]
        self._history = list(history_of(log)) if log is not None and log.is_file() else []
        self._written = float("-inf")

    def __call__(self, event: Estimate | Report) -> None:
        """Take a report; every few seconds, write the page."""
        if not is_first_rank():
            return
        if isinstance(event, Report):
            self._history += history_of([event])
        if time.monotonic() - self._written >= _EVERY:
            try:
                self._write(while_learning(self._network, event, self._history))
            except FileError as error:
                if self._written == float("-inf"):
                    raise
                show.note(f"warning: {error}; learning goes on")  # a disk that is full now must not end the run
            self._written = time.monotonic()

    def finished(self, path: Path, masks: halve.MaskSet, plan: Path | None) -> None:
        """Write the page of the masks."""
        self._write(halve.report({str(path): masks}, log=self._history or None, plan=plan))

    def failed(self, why: str) -> None:
        """Write why the run failed, with the curve so far."""
        if is_first_rank():
            self._write(while_learning(self._network, None, self._history, error=why))

    def _write(self, page: Page) -> None:
        self._output.write(lambda path: page.save(path, force=self._force))
