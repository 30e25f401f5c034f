"""What was timed before, per GPU: a JSON file beside the compiled kernels. Losing it costs time, nothing else."""

import functools
import hashlib
import json
import os
import re
from importlib import resources
from pathlib import Path

import torch

from halve.engine.kernels.cuda import jit
from halve.errors import FileError
from halve.masks.storage import write_atomically


class Memory:
    """Times in milliseconds of the ways of one layer, by a key that holds all that decides them.

    >>> memory = Memory(None)
    >>> memory.remember("a layer", {"torch": 0.1})
    >>> memory.recall("a layer", ["torch"])
    {'torch': 0.1}
    >>> memory.recall("a layer", ["torch", "gemm"]) is None
    True
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, dict[str, float]] = _read(path)

    @classmethod
    def of(cls, device: torch.device) -> "Memory":
        """Of a GPU: of its name, the driver's libraries and our kernels."""
        name = re.sub(r"\W+", "-", torch.cuda.get_device_name(device)).strip("-")
        return cls(jit.folder() / f"timings-{name}-{_versions()}.json")

    def recall(self, key: str, ways: list[str]) -> dict[str, float] | None:
        """The times of all these ways, or None."""
        found = self.known.get(key, {})
        return {way: found[way] for way in ways} if all(way in found for way in ways) else None

    def remember(self, key: str, times: dict[str, float]) -> None:
        self.known[key] = {**self.known.get(key, {}), **times}

    def save(self) -> None:
        """Add to what others wrote in the meantime. A disk that cannot be written to is none of the user's worries."""
        if self.path is None:
            return
        self.known = {**_read(self.path), **self.known}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.known, indent=0).encode())
        except (OSError, FileError):
            return


@functools.cache
def _versions() -> str:
    source = resources.files("halve.engine.kernels.mma_sp").joinpath("conv.cu").read_text()
    parts = (source, torch.__version__, str(torch.version.cuda), str(torch.backends.cudnn.version()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _read(path: Path | None) -> dict[str, dict[str, float]]:
    """What a file holds; nothing where it is missing, torn or something else."""
    if path is None or not os.path.exists(path):
        return {}
    try:
        found = json.loads(path.read_text())
        return {str(key): {str(way): float(time) for way, time in times.items()} for key, times in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
