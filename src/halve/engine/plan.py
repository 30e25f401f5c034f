"""Time the ways that each layer can run in, take the fastest, say why."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from halve.engine import ops
from halve.engine.layer import DENSE, Layer, pixels_of
from halve.engine.timing import graph_times
from halve.engine.timing_cache import Memory
from halve.errors import EngineError

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
    key: str  # under which the times are remembered
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


def decide(layers: list[Layer], run: Callable[[], object], memory: Memory, *, sparse: bool) -> list[Entry]:
    """Time each layer by itself, then whole networks with layers sparse above some bar, and take the best.

    `run` runs the network on the input that it is planned for; without `sparse` only dense ways are tried.
    """
    before = {id(layer): dict(layer.ways) for layer in layers}
    timings = timed(layers, run, memory, sparse)
    if not timings:
        return []
    tried = {"dense": [timing.best("dense") for timing in timings]}
    for bar in BARS:
        ways = [timing.above(bar) for timing in timings]
        if ways not in tried.values():
            tried[f"from {bar:g} x dense on"] = ways
    for timing, possible in zip(timings, zip(*tried.values(), strict=True), strict=True):
        timing.layer.hold([*timing.layer.ways.values(), *possible])
    described = repr(([timing.key for timing in timings], tried))
    key = f"network {hashlib.sha256(described.encode()).hexdigest()}"
    times = memory.recall(key, list(tried))
    if times is None:
        times = graph_times({name: _in_ways(timings, ways, run) for name, ways in tried.items()})
        memory.remember(key, times)
        memory.save()
    best = min(times, key=lambda name: times[name])
    for timing, way in zip(timings, tried[best], strict=True):
        timing.layer.take({**before[id(timing.layer)], timing.pixels: way})
    return [entry_of(timing, way, _reason(timing, way, best)) for timing, way in zip(timings, tried[best], strict=True)]


def timed(layers: list[Layer], run: Callable[[], object], memory: Memory, sparse: bool = True) -> list[Timed]:
    """Run the network once; each layer is timed on the input that it gets, the first time there is something in it."""
    found: dict[int, Timed] = {}

    def stop_by(layer: Layer, args: tuple[Any, ...]) -> None:
        if id(layer) not in found and args[0].numel():
            x, residual = args[0], args[1] if len(args) > 1 else None
            found[id(layer)] = _timed(layer, x, residual, memory, sparse)

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


def _in_ways(timings: list[Timed], ways: list[str], run: Callable[[], object]) -> Callable[[], object]:
    def in_these() -> object:
        for timing, way in zip(timings, ways, strict=True):
            timing.layer.ways = {timing.pixels: way}
        return run()

    return in_these


def _reason(timing: Timed, way: str, chosen: str) -> str:
    if way == timing.best("any"):
        reason = "fastest"
    elif way in ops.DENSE_WAYS:
        reason = "the network is faster with this layer dense"
    else:
        reason = f"the network is faster with layers on our kernels {chosen}"
    return reason if timing.layer.halved else f"{reason}, not 2:4"


def _timed(layer: Layer, x: Tensor, residual: Tensor | None, memory: Memory, sparse: bool) -> Timed:
    ways = [way for way in layer.possible() if sparse or way in ops.DENSE_WAYS]
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
    return Timed(layer, int(pixels_of(x, layer.linear)), shape, key, right)


def _measured(layer: Layer, x: Tensor, residual: Tensor | None, ways: list[str]) -> dict[str, float]:
    """Milliseconds of each way; infinite where a library has none for this shape, or where it is wrong on this GPU.

    Left out is what may be another time: a kernel of ours that cannot be compiled, memory that others hold now.
    """
    expected = layer.run(x, residual, DENSE).float()
    tolerance = _TOLERANCE.get(x.dtype, 1e-3) * float(expected.abs().nan_to_num().max().clamp(min=1e-6))
    calls, not_now = {}, set()
    for way in ways:
        try:
            got = layer.run(x, residual, way).float()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, EngineError | torch.OutOfMemoryError) or "ALLOC" in str(error):
                not_now.add(way)
            continue
        if bool(torch.isclose(got, expected, rtol=0, atol=tolerance, equal_nan=True).all()):
            calls[way] = lambda way=way: layer.run(x, residual, way)
    times = graph_times(calls)
    return {way: times.get(way, float("inf")) for way in ways if way not in not_now}
