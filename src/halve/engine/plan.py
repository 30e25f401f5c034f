"""Time the ways that each layer can run in, take the fastest, say why."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from halve.engine import ops
from halve.engine.layer import DENSE, Layer, pixels_of
from halve.engine.memory import Memory
from halve.engine.timing import graph_times

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest output, when a way is tried
COLUMNS = ("layer", "shape", "kernel", "ms", "dense ms", "twin ms", "sparse ms", "reason")
BARS = (1.0, 0.8, 0.6)  # how much of a dense layer's speed a sparse one may be short of, when tried in the network


@dataclass(frozen=True)
class Entry:
    """How one layer runs for one size of input, beside its fastest dense way and our kernels with all and half weights.

    Times are None where they were not taken, or where there is no such way.
    """

    layer: str
    shape: str
    kernel: str
    time_ms: float | None
    dense_ms: float | None
    twin_ms: float | None
    sparse_ms: float | None
    reason: str

    def cells(self) -> tuple[str, ...]:
        """As a row of words, in the order of `COLUMNS`."""
        times = (self.time_ms, self.dense_ms, self.twin_ms, self.sparse_ms)
        words = ("" if time is None else f"{time:.4f}" for time in times)
        return (self.layer, self.shape, self.kernel, *words, self.reason)


@dataclass
class Plan:
    """A table: which layer runs how, for each batch size; `left` names what runs as it was, and why.

    `dense` says why no layer runs sparse, where none can.

    >>> plan = Plan({1: [Entry("fc", "4>2 at 1", "sparse 64x64", 0.004, 0.006, 0.005, 0.004, "fastest")]}, {})
    >>> print(plan)
    batch 1, 1 of 1 layers sparse
    layer | shape    | kernel       | ms     | dense ms | twin ms | sparse ms | reason
    fc    | 4>2 at 1 | sparse 64x64 | 0.0040 | 0.0060   | 0.0050  | 0.0040    | fastest
    """

    batches: dict[int, list[Entry]]
    left: dict[str, str]
    dense: str | None = None

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self.batches.values() for entry in entries)

    def as_json(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return {
            "batches": {str(size): [asdict(e) for e in table] for size, table in self.batches.items()},
            "left": self.left,
            "dense": self.dense,
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Plan":
        batches = {int(size): [Entry(**entry) for entry in table] for size, table in plain["batches"].items()}
        return cls(batches, dict(plain["left"]), plain["dense"])

    def __str__(self) -> str:
        lines = [] if self.dense is None else [f"all layers dense: {self.dense}"]
        for batch, entries in self.batches.items():
            sparse = sum(entry.kernel.startswith("sparse") for entry in entries)
            lines.append(f"batch {batch}, {sparse} of {len(entries)} layers sparse")
            rows = [COLUMNS, *(entry.cells() for entry in entries)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += [" | ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"{name}: as it was ({reason})" for name, reason in self.left.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Timed:
    """What one layer takes on one input, in each way that is right."""

    layer: Layer
    pixels: int
    shape: str
    times: dict[str, float]

    def best(self, kind: str) -> str:
        """The fastest way of a kind: "dense", "ours" or "any"; a dense one where there is none of ours."""
        ways = [way for way in self.times if kind == "any" or (way in ops.DENSE_WAYS) == (kind == "dense")]
        return min(ways, key=lambda way: self.times[way]) if ways else DENSE

    def above(self, bar: float) -> str:
        """The fastest of our kernels where it has that share of the dense speed, otherwise the fastest dense way."""
        ours, dense = self.best("ours"), self.best("dense")
        taken = ours not in ops.DENSE_WAYS and self.times.get(dense, float("inf")) >= bar * self.times[ours]
        return ours if taken else dense


def timed(layers: list[Layer], run: Callable[[], object], memory: Memory) -> list[Timed]:
    """Run the network once; each layer that is reached is timed on the input that it gets, the first time."""
    found: dict[int, Timed] = {}

    def stop_by(layer: Layer, args: tuple[Any, ...]) -> None:
        if id(layer) not in found:
            x, residual = args[0], args[1] if len(args) > 1 else None
            found[id(layer)] = _timed(layer, x, residual, memory)

    handles = [layer.register_forward_pre_hook(stop_by) for layer in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    memory.save()
    return [found[id(layer)] for layer in layers if id(layer) in found]


def entry_of(timing: Timed, way: str, reason: str) -> Entry:
    """A line of the plan."""
    times = timing.times
    dense = times.get(timing.best("dense"))
    twin, sparse = (min((times[w] for w in times if w.startswith(kind)), default=None) for kind in ("twin", "sparse"))
    return Entry(timing.layer.name, timing.shape, way, times.get(way), dense, twin, sparse, reason)


def _timed(layer: Layer, x: Tensor, residual: Tensor | None, memory: Memory) -> Timed:
    ways = layer.possible()
    geometry = layer.geometry
    size = f"{x.shape[0]} x {x.shape[2]} x {x.shape[3]}" if x.dim() == 4 and not layer.linear else f"{len(x)}"
    stride = f"/{geometry.stride[0]}" if geometry.stride != (1, 1) else ""
    shape = f"{geometry.channels}>{geometry.rows} {geometry.kernel[0]}x{geometry.kernel[1]}{stride} at {size}"
    key = "|".join(map(str, (geometry, tuple(x.shape), x.dtype, residual is not None, layer.linear, layer.halved)))
    times = memory.recall(key, ways) if len(ways) > 1 else {}
    if times is None:
        before = list(layer.ways.values())
        layer.hold([*ways, *before])
        times = _measured(layer, x, residual, ways)
        layer.hold([*before, DENSE])
        memory.remember(key, times)
    right = {way: time for way, time in times.items() if time != float("inf")}
    return Timed(layer, int(pixels_of(x, layer.linear)), shape, right)


def _measured(layer: Layer, x: Tensor, residual: Tensor | None, ways: list[str]) -> dict[str, float]:
    """Milliseconds of each way; infinite where it fails or is wrong on this GPU.

    Left out is what wants memory that others hold now: that may be another time.
    """
    expected = layer.run(x, residual, DENSE).float()
    tolerance = _TOLERANCE.get(x.dtype, 1e-3) * float(expected.abs().nan_to_num().max().clamp(min=1e-6))
    calls, crowded = {}, set()
    for way in ways:
        try:
            got = layer.run(x, residual, way).float()
        except torch.OutOfMemoryError:
            crowded.add(way)
            continue
        except (RuntimeError, ValueError):  # a library that has no kernel for this shape
            continue
        if bool(torch.isclose(got, expected, rtol=0, atol=tolerance, equal_nan=True).all()):
            calls[way] = lambda way=way: layer.run(x, residual, way)
    times = graph_times(calls)
    return {way: times.get(way, float("inf")) for way in ways if way not in crowded}
