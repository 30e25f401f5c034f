"""The time that a call of `learn` may take, from its first line to its last."""

import time


class TimeBudget:
    """A clock that starts now; without minutes it only counts.

    >>> TimeBudget(minutes=2).left <= 120
    True
    >>> TimeBudget(minutes=None).left is None
    True
    """

    def __init__(self, minutes: float | None) -> None:
        self._started = time.perf_counter()
        self.seconds = None if minutes is None else 60 * minutes

    def resume(self, spent: float) -> None:
        """Go on from what a run had spent when it was saved: starting it again does not count."""
        self._started = time.perf_counter() - spent

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._started

    @property
    def left(self) -> float | None:
        """Seconds left, which may be negative; None without a limit."""
        return None if self.seconds is None else self.seconds - self.spent
