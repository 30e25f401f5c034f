"""A cache of kernel timings: a JSON file next to the compiled kernels. Deleting it only costs time."""

import functools
import hashlib
import json
import operator
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, map_arg

from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import family_of
from halve.engine.layer import Layer
from halve.errors import FileError
from halve.locks import locked
from halve.machine import device_name
from halve.masks.storage import write_atomically

Times = dict[str, dict[str, float]]
_Name = TypeVar("_Name", bound=Hashable)
_LONGEST_WAIT = 10.0  # seconds, for another process that writes


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
        self.known = _read(path)
        self._put: Times = {}  # what is not in the file yet

    @classmethod
    def of(cls, device: torch.device) -> "TimingCache":
        """The cache for a device and the installed libraries."""
        name = re.sub(r"\W+", "-", device_name(device)).strip("-")
        return cls(jit.cache_dir() / f"timings-{name}-{_libraries()}.json")

    def get(self, key: str, names: Iterable[str]) -> dict[str, float] | None:
        """The times of all these names, or None if one is missing."""
        wanted, found = list(names), self.known.get(key, {})
        return {name: found[name] for name in wanted} if all(name in found for name in wanted) else None

    def look_up(
        self, key: str | None, ids: Mapping[_Name, str], measured: Callable[[], Mapping[_Name, float]]
    ) -> dict[_Name, float]:
        """The times of these names: stored ones if all are known, otherwise measured now and stored.

        Call `save` to write them to the file.

        Args:
            key: as in `get`. Default: neither look up nor store.
            ids: what each name is called in the cache.
            measured: measures all of them. It may leave out names, which are then measured again next time.

        >>> cache = TimingCache(None)
        >>> cache.look_up("net", {"separate": "two kernels", "joined": "one"}, lambda: {"separate": 0.2, "joined": 0.1})
        {'separate': 0.2, 'joined': 0.1}
        >>> cache.look_up("net", {"together": "one"}, lambda: {})
        {'together': 0.1}
        """
        known = None if key is None else self.get(key, ids.values())
        if known is not None:
            return {name: known[described] for name, described in ids.items()}
        times = dict(measured())
        if key is not None:
            self.put(key, {ids[name]: time for name, time in times.items()})
        return times

    def put(self, key: str, times: Mapping[str, float]) -> None:
        for times_of in (self.known, self._put):
            times_of[key] = {**times_of.get(key, {}), **times}

    def save(self) -> None:
        """Write the file, merged with what other processes have written. Errors are ignored."""
        if self.path is None or not self._put:
            return
        with locked(self.path.with_suffix(".lock"), _LONGEST_WAIT):
            written = _read(self.path)
            merged = written | {key: {**written.get(key, {}), **times} for key, times in self._put.items()}
            try:
                write_atomically(self.path, json.dumps(merged, indent=0).encode())
            except (OSError, FileError):
                return
        self.known, self._put = merged, {}


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


def _read(path: Path | None) -> Times:
    """The contents of a cache file; empty if it is missing or invalid."""
    if path is None or not os.path.exists(path):
        return {}
    try:
        found = json.loads(path.read_text())
        return {str(key): {str(name): float(time) for name, time in times.items()} for key, times in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
