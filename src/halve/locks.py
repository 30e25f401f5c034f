"""Locks on files, for processes that share a cache or a device. The system releases the lock of a killed process."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked(path: Path, longest_wait: float) -> Iterator[None]:
    """Hold a lock on a file, which is created if it is missing.

    For work that is only slower or less precise without the lock: after `longest_wait` seconds, and where files cannot
    be locked, it goes on without. A process that is stopped while it holds the lock does not block others forever.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder) / "lock", longest_wait=1):
    ...     pass
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a folder that cannot be written to
            lock = None
        if lock is not None:
            stack.callback(_release, lock)
            _wait(lock, longest_wait)
        yield


def _release(lock: int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_UN)  # forked processes have the file open, too
    os.close(lock)


def _wait(lock: int, longest: float) -> None:
    ends, pause = time.monotonic() + longest, 1e-3
    while fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > ends:
                return
        except OSError:  # a file system without locks
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
