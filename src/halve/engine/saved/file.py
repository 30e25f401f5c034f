"""Files with compiled networks: the graph, its tensors, guards and plan, in the envelope of all of halve's files.

Reading never runs code: tensors are bytes, and everything else is JSON in which only names from a list lead to an
operator. docs/reference/file-formats.md specifies the format. Nothing is timed again after loading: on another GPU, the
network uses the plan it was saved with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from halve.engine.capture.guards import Guards
from halve.engine.plan import Entry, Plan, PlannedJoin
from halve.engine.saved import graph, plain
from halve.engine.saved.check import check_runs
from halve.errors import EngineError, FileError
from halve.graph import TRACING_LOCK
from halve.masks import storage

FORMAT = storage.Format("halve.compiled", 1, "compiled network", "'halve compile' or Compiled.save")
SUFFIX = ".compiled.safetensors"
_KEYS = {"inputs", "dtype", "device", "guards", "plan", "nodes", "outputs", "structure"}
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_MOST_ELEMENTS = 1 << 36  # of an input
_MOST_TEXT = 1_000_000  # characters of all conditions


@dataclass(frozen=True)
class SavedNetwork:
    """The contents of a file."""

    body: GraphModule
    example: tuple[Tensor, ...]  # one image of each input, in the dtype of inputs
    dtype: torch.dtype  # the compute dtype
    guards: Guards
    device: torch.device
    plan: Plan


def write(path: str | Path, network: SavedNetwork, force: bool = False) -> None:
    """Save a network to a file, atomically. Replaces only compiled networks unless `force`."""
    described, tensors = graph.describe(network.body, network.device)
    guards = network.guards
    if _too_long(guards.conditions):
        raise EngineError("the network cannot be saved: it has too many guards; compile it without any_size=True")
    header = {
        "inputs": [{"dtype": plain.name_of(x.dtype), "shape": list(x.shape)} for x in network.example],
        "dtype": plain.name_of(network.dtype),
        "device": network.device.type,
        "guards": {"sizes": guards.sizes, "names": guards.names, "conditions": guards.conditions},
        "plan": _printable(network.plan.as_json()),
        **described,
    }
    storage.write(path, FORMAT, header, tensors, force=force)


def _printable(value: Any) -> Any:
    """JSON with printable texts."""
    if isinstance(value, str):
        return plain.printable(value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return {_printable(key): _printable(item) for key, item in value.items()} if isinstance(value, dict) else value


def read(path: str | Path) -> SavedNetwork:
    """Load a file. Raises `FileError` if it is damaged, from another version, or not a compiled network."""
    if storage.read_bytes(Path(path), 4) == b"PK\x03\x04":
        raise FileError(
            f"{path} is a zip archive, not a compiled network, unless an older halve wrote it: compile the model again"
        )
    _, header, tensors = storage.read(path, [FORMAT])
    try:
        with TRACING_LOCK:
            return _built(header, tensors)
    except Exception as error:  # a description of something impossible; `graph` and `check` say what
        raise FileError(f"{path} is damaged, or of another version: {plain.reason(error)}") from error


def _built(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedNetwork:
    if header.keys() != _KEYS:
        raise ValueError(f"its header must have the keys {', '.join(sorted(_KEYS))}")
    dtype, device = plain.dtype_named(header["dtype"], floating=True), header["device"]
    if device not in _DEVICES:
        raise ValueError(f"its device must be one of {', '.join(_DEVICES)}")
    example = tuple(map(_input, header["inputs"]))
    if not example:
        raise ValueError("it must have an input")
    guards = _guards(header["guards"], example)
    body = graph.build(header, tensors, len(example))
    check_runs(body, [_two_images(x, dtype) for x in example])
    return SavedNetwork(body, example, dtype, guards, torch.device(device), _plan(header["plan"]))


def _input(entry: Any) -> Tensor:
    """An image of zeros that takes no memory."""
    shape, dtype = entry["shape"], plain.dtype_named(entry["dtype"])
    if entry.keys() != {"shape", "dtype"} or not _are_sizes(shape) or shape[:1] != [1]:
        raise ValueError("an input must have a dtype and the shape of one image")
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"an input of shape {tuple(shape)} is too large: {_MOST_ELEMENTS:,} elements at most")
    return torch.zeros((), dtype=dtype).expand(shape)


def _two_images(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Two images as the graph gets them, without memory."""
    return torch.empty((2, *x.shape[1:]), dtype=dtype if x.is_floating_point() else x.dtype, device="meta")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(size) is int and 0 <= size <= _MOST_ELEMENTS for size in values)


def _guards(entry: Any, example: tuple[Tensor, ...]) -> Guards:
    sizes, names, conditions = (entry[key] for key in ("sizes", "names", "conditions"))
    if len(sizes) != len(example) or _too_long(conditions):
        raise ValueError(f"its guards must have the sizes of each input, and {_MOST_TEXT:,} characters at most")
    for limits, x in zip(sizes, example, strict=True):
        numbers = [least if size is None else size for least, most in limits for size in (least, most)]
        if len(limits) != x.dim() or not _are_sizes(numbers):
            raise ValueError("its guards must have the smallest and largest size of each dimension")
    if not all(name.removeprefix("*").isidentifier() for name in names):
        raise ValueError("its guards must have the names of inputs")
    guards = Guards(
        tuple(tuple((least, most) for least, most in limits) for limits in sizes),
        tuple(names),
        tuple(map(plain.check_text, conditions)),
    )
    if (broken := guards.broken(tuple(_two_images(x, x.dtype) for x in example))) is not None:
        raise ValueError(f"its own example does not have {broken}")
    return guards


def _too_long(conditions: Sequence[str]) -> bool:
    return sum(map(len, conditions), len(conditions)) > _MOST_TEXT


def _plan(entry: Any) -> Plan:
    batches, uncompiled, dense, inductor = (entry[key] for key in ("batches", "uncompiled", "dense", "inductor"))
    joins = entry.get("joins", {})  # files of older versions have none
    if not all(type(seconds) in (int, float) for seconds in inductor.values()):
        raise ValueError("its plan must have the seconds that Inductor took")
    return Plan(
        {plain.positive(size): [plain.build(Entry, row) for row in table] for size, table in batches.items()},
        {plain.check_text(name): plain.check_text(reason) for name, reason in uncompiled.items()},
        None if dense is None else plain.check_text(dense),
        {plain.positive(size): float(seconds) for size, seconds in inductor.items()},
        {plain.positive(size): [plain.build(PlannedJoin, join) for join in found] for size, found in joins.items()},
    )
