"""Ctrl-C takes effect between two steps, never within one: half a step must not be saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C: the first one sets a flag, which the yielded function reads; the second interrupts at once.

    >>> with deferred_interrupt() as interrupted:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupted()
    True
    """
    pressed = False
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread may set handlers, background jobs ignore SIGINT, and None is a handler set outside Python.
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
