"""Processes that time kernels on the same GPU take turns: one would measure the other's work as well."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from halve.engine.kernels.cuda import jit
from halve.locks import locked

LONGEST_WAIT = 60.0  # seconds
_held = threading.local()  # whether this thread has its turn: one may be asked for within another


@contextlib.contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Wait until no other process times kernels on this GPU. Does nothing on a CPU.

    >>> with turn(torch.device("cpu")):
    ...     pass
    """
    if device.type != "cuda" or getattr(_held, "turn", False):
        yield
        return
    with locked(jit.cache_dir() / f"timing-{torch.cuda.get_device_properties(device).uuid}.lock", LONGEST_WAIT):
        _held.turn = True
        try:
            yield
        finally:
            _held.turn = False
