"""Ctrl-C between two steps, never within one: half a step must not be saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """While it lasts, Ctrl-C only sets a flag, which the given function reads; a second Ctrl-C interrupts at once.

    >>> with deferred_interrupt() as pressed:
    ...     signal.raise_signal(signal.SIGINT)
    ...     pressed()
    True
    """
    pressed = False
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread may handle signals; a job in the background ignores them; None is a handler not of Python's.
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: False
        return

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
