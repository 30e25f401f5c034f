"""Processes that time kernels on the same GPU take turns: one would measure the other's work as well."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from halve.engine.kernels.cuda import jit

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LONGEST_WAIT = 60.0  # seconds. A process that is stopped while it holds the lock must not block others forever.
_held = threading.local()  # this thread's nesting: a turn may be asked for within a turn


@contextlib.contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Wait until no other process times kernels on this GPU. On a CPU, and where files cannot be locked, do nothing.

    The system releases the lock of a process that is killed.

    >>> with turn(torch.device("cpu")):
    ...     pass
    """
    if device.type != "cuda" or fcntl is None or getattr(_held, "turn", False):
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    with locked(jit.cache_dir() / f"timing-{uuid}.lock", LONGEST_WAIT):
        _held.turn = True
        try:
            yield
        finally:
            _held.turn = False


@contextlib.contextmanager
def locked(path: Path, longest_wait: float) -> Iterator[None]:
    """Hold a lock on a file. Go on without it after `longest_wait` seconds, or if there is no such lock here."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a folder that cannot be written to
            yield
            return
        stack.callback(os.close, lock)  # releases the lock
        _wait(lock, longest_wait)
        yield


def _wait(lock: int, longest: float) -> None:
    ends, pause = time.monotonic() + longest, 1e-3
    while True:
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
