"""A cache of kernel timings: a JSON file next to the compiled kernels. Deleting it only costs time."""

import functools
import hashlib
import json
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule, map_arg

from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import family_of
from halve.engine.layer import Layer
from halve.errors import FileError
from halve.machine import device_name
from halve.masks.storage import write_atomically


class TimingCache:
    """Milliseconds by key and kernel. A key describes everything that affects timings except the kernel itself.

    >>> cache = TimingCache(None)
    >>> cache.put("a layer", {"dense torch": 0.1})
    >>> cache.get("a layer", ["dense torch"])
    {'dense torch': 0.1}
    >>> cache.get("a layer", ["dense torch", "dense gemm"]) is None
    True
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, dict[str, float]] = _read(path)
        self._changed = False

    @classmethod
    def of(cls, device: torch.device) -> "TimingCache":
        """The cache for a device and the installed libraries."""
        name = re.sub(r"\W+", "-", device_name(device)).strip("-")
        return cls(jit.cache_dir() / f"timings-{name}-{_libraries()}.json")

    def get(self, key: str, names: Iterable[str]) -> dict[str, float] | None:
        """The times of all these names, or None if one is missing."""
        wanted, found = list(names), self.known.get(key, {})
        return {name: found[name] for name in wanted} if all(name in found for name in wanted) else None

    def put(self, key: str, times: Mapping[str, float]) -> None:
        self.known[key] = {**self.known.get(key, {}), **times}
        self._changed = True

    def save(self) -> None:
        """Write the file, merged with what other processes have written. Errors are ignored."""
        if self.path is None or not self._changed:
            return
        self.known = {**_read(self.path), **self.known}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.known, indent=0).encode())
        except (OSError, FileError):
            return


def kernel_id(kernel: Kernel) -> str:
    """A kernel and the version of its family, so that changed sources or variants are timed again."""
    return f"{kernel} {family_of(kernel).version}"


def layer_key(layer: Layer, inputs: list[Tensor]) -> str:
    """The cache key of a layer: everything that affects its timings except the kernel."""
    shapes = [(tuple(x.shape), str(x.dtype)) for x in inputs]
    return f"{layer.operation.to_json()} {layer.dtype} {'2:4' if layer.is_2_4 else 'dense'} {shapes}"


def network_key(body: torch.nn.Module, inputs: tuple[Tensor, ...]) -> str | None:
    """The cache key of a network, or None if it runs code outside of its graph."""
    if not isinstance(body, GraphModule):
        return None
    lines = [_described(x) for x in inputs]
    numbers = {node: f"%{number}" for number, node in enumerate(body.graph.nodes)}  # names differ between captures
    for node in body.graph.nodes:
        described = "" if node.op in ("placeholder", "output") else str(node.target)
        if node.op in ("call_module", "get_attr"):
            described = _described(operator.attrgetter(str(node.target))(body))
        lines.append(f"{node.op} {described} {map_arg((node.args, node.kwargs), numbers.__getitem__)}")
    return f"network {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def _described(value: object) -> str:
    """What affects timings of a tensor or a module."""
    if isinstance(value, Tensor):
        return str((tuple(value.shape), value.dtype, value.stride()))
    return f"{value.operation.to_json()} {value.piece}" if isinstance(value, Layer) else repr(value)


@functools.cache
def _libraries() -> str:
    return jit.digest(torch.__version__, str(torch.version.cuda), str(torch.backends.cudnn.version()))


def _read(path: Path | None) -> dict[str, dict[str, float]]:
    """The contents of a cache file; empty if it is missing or invalid."""
    if path is None or not os.path.exists(path):
        return {}
    try:
        found = json.loads(path.read_text())
        return {str(key): {str(name): float(time) for name, time in times.items()} for key, times in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
