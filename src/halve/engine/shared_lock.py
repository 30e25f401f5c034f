"""A lock that many threads share, or one holds alone."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class SharedLock:
    """Calls of a network share it, so that they run side by side. Planning, which changes its layers, holds it alone.

    Whoever waits to hold it alone goes before new calls. A copy gets a new lock.

    >>> lock = SharedLock()
    >>> with lock.shared():
    ...     pass
    >>> with lock.alone(), lock.shared():  # planning calls the network itself
    ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing, self._waiting = 0, 0
        self._owner: int | None = None  # the thread that holds it alone

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        if self._owner == threading.get_ident():
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: self._owner is None and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        if self._owner == threading.get_ident():
            yield
            return
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._owner is None and not self._sharing)
            self._waiting -= 1
            self._owner = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._changed.notify_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedLock":
        return SharedLock()

    def __reduce__(self) -> Any:
        return SharedLock, ()
