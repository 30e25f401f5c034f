"""Time the kernels that may be the fastest for a layer, choose the fastest, and say why."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halve.batches import Progress, tracked
from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel, KernelFamily, Layout
from halve.engine.kernels.registry import FALLBACK, family_of
from halve.engine.layer import Layer
from halve.engine.timing import measure, ran_out_of_memory
from halve.engine.timing_cache import TimingCache, kernel_id, layer_key
from halve.engine.turns import turn
from halve.errors import EngineError
from halve.markup import table, text
from halve.outputs import relative_error
from halve.text import aligned, formatted_bytes

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative error that a kernel may have; 1e-3 in other dtypes
COLUMNS = ("layer", "shape", "kernel", "ms", "dense ms", "our dense ms", "sparse ms", "reason")
Jobs = dict[object, Callable[[], object]]  # compilations of kernels, each once
THRESHOLDS = (1.0, 0.8, 0.6)  # relative to dense speed: above each of these, our kernels are tried in the whole network
_MIN_SHARE, _MAX_RATIO, _MAX_TRIED = 0.02, 1.25, 6  # of kernels tried in the network one layer at a time: see `_others`
_CHOSEN = "chosen"  # the name of a combination of kernels
_GAIN = 0.005  # of the network's time, by which another kernel must be faster to be taken


@dataclass(frozen=True)
class Entry:
    """The kernel of one layer for one input size. Times are None if not measured, or if there is no such kernel."""

    layer: str
    shape: str
    kernel: str
    sparse: bool
    time_ms: float | None
    dense_ms: float | None  # the fastest library kernel
    our_dense_ms: float | None  # our fastest kernel on dense weights: the baseline that isolates the effect of sparsity
    sparse_ms: float | None
    reason: str

    def cells(self) -> tuple[str, ...]:
        """The entry as table cells, one per column in `COLUMNS`."""
        times = (self.time_ms, self.dense_ms, self.our_dense_ms, self.sparse_ms)
        words = ("" if time is None else f"{time:.4f}" for time in times)
        return (self.layer, self.shape, self.kernel, *words, self.reason)


@dataclass(frozen=True)
class PlannedJoin:
    """Two layers that run in one kernel (see `join.py`)."""

    layer: str
    other: str
    family: str
    variant: str


@dataclass
class Plan:
    """Which kernel each layer uses at each batch size. Prints as a table.

    `uncompiled` lists what falls back to eager, and why. `dense` says why no layer runs sparse, if none can. `inductor`
    has the batch sizes at which Inductor compiles what lies between the layers, and the seconds that compiling took.
    `joins` has the layers that run in one kernel, by batch size. `code_bytes` is the size of the machine code that was
    emitted for this CPU, counted once where layers share it; 0 on GPUs. It is not part of files.

    >>> entry = Entry("fc", "4>2 at 1", "mma_sp 64x64", True, 0.004, 0.006, 0.005, 0.004, "fastest")
    >>> print(Plan({1: [entry]}, {}))
    batch 1, 1 of 1 layers sparse
    layer | shape    | kernel       | ms     | dense ms | our dense ms | sparse ms | reason
    fc    | 4>2 at 1 | mma_sp 64x64 | 0.0040 | 0.0060   | 0.0050       | 0.0040    | fastest
    """

    batches: dict[int, list[Entry]]
    uncompiled: dict[str, str]
    dense: str | None = None
    inductor: dict[int, float] = field(default_factory=dict)
    joins: dict[int, list[PlannedJoin]] = field(default_factory=dict)
    code_bytes: int = 0

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self.batches.values() for entry in entries)

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "batches": {str(size): [asdict(e) for e in table] for size, table in self.batches.items()},
            "uncompiled": self.uncompiled,
            "dense": self.dense,
            "inductor": {str(size): seconds for size, seconds in self.inductor.items()},
            "joins": {str(size): [asdict(join) for join in joins] for size, joins in self.joins.items()},
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Plan":
        batches = {int(size): [Entry(**entry) for entry in table] for size, table in plain["batches"].items()}
        return cls(
            batches,
            dict(plain["uncompiled"]),
            plain["dense"],
            {int(size): seconds for size, seconds in plain["inductor"].items()},
            {int(size): [PlannedJoin(**join) for join in joins] for size, joins in plain["joins"].items()},
        )

    def rest(self, batch: int) -> str:
        """What the table's title says about the operations between the layers."""
        return f", the rest compiled by Inductor in {self.inductor[batch]:.0f} s" if batch in self.inductor else ""

    def notes(self) -> list[str]:
        """What there is to say beside the tables."""
        return [f"machine code: {formatted_bytes(self.code_bytes)}"] if self.code_bytes else []

    def _repr_html_(self) -> str:
        """A table for each batch size, for notebooks."""
        heads = [f">{head}" if head.endswith("ms") else head for head in COLUMNS]
        tables = [
            table(
                f"batch {batch}, {sum(entry.sparse for entry in entries)} of {len(entries)} layers sparse"
                f"{self.rest(batch)}",
                heads,
                [entry.cells() for entry in entries],
            )
            for batch, entries in self.batches.items()
        ]
        if self.dense is not None:
            tables.insert(0, f"<p>all layers dense: {text(self.dense)}</p>")
        if self.uncompiled:
            tables.append(table("not compiled", ("name", "reason"), list(self.uncompiled.items())))
        return "".join([*tables, *(f"<p>{text(note)}</p>" for note in self.notes())])

    def __str__(self) -> str:
        lines = [] if self.dense is None else [f"all layers dense: {self.dense}"]
        for batch, entries in self.batches.items():
            sparse = sum(entry.sparse for entry in entries)
            lines.append(f"batch {batch}, {sparse} of {len(entries)} layers sparse{self.rest(batch)}")
            rows = [COLUMNS, *(entry.cells() for entry in entries)]
            lines += aligned(rows)
        lines += [*self.notes(), *(f"{name}: {reason}" for name, reason in self.uncompiled.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of every kernel that computes one layer correctly on one input."""

    layer: Layer
    size: int
    shape: str
    times: dict[Kernel, float]

    @property
    def best(self) -> Kernel:
        return self._fastest(lambda kernel: True) or FALLBACK

    @property
    def best_dense(self) -> Kernel:
        """The fastest library kernel. A layer without weights counts as dense on any kernel in a layout of theirs."""

        def dense(kernel: Kernel) -> bool:
            family = family_of(kernel)
            return family.library or (not self.layer.has_weight and family.reads is not Layout.PLANES)

        return self._fastest(dense) or FALLBACK

    @property
    def best_ours(self) -> Kernel | None:
        return self._fastest(lambda kernel: not family_of(kernel).library)

    @property
    def best_our_dense(self) -> Kernel | None:
        """Our fastest kernel on dense weights."""
        return self._fastest(lambda kernel: not family_of(kernel).library and not family_of(kernel).sparse)

    def ours_above(self, threshold: float) -> Kernel:
        """Our fastest kernel if it reaches this fraction of the dense speed, otherwise the fastest dense kernel."""
        ours, dense = self.best_ours, self.best_dense
        if ours is None or self.times.get(dense, float("inf")) < threshold * self.times[ours]:
            return dense
        return ours

    def ms(self, matches: Callable[[Kernel], bool]) -> float | None:
        return min((time for kernel, time in self.times.items() if matches(kernel)), default=None)

    def entry(self, kernel: Kernel, reason: str) -> Entry:
        """A row of the plan."""
        return Entry(
            layer=self.layer.name,
            shape=self.shape,
            kernel=str(kernel),
            sparse=family_of(kernel).sparse,
            time_ms=self.times.get(kernel),
            dense_ms=self.ms(lambda k: family_of(k).library),
            our_dense_ms=self.ms(lambda k: not family_of(k).library and not family_of(k).sparse),
            sparse_ms=self.ms(lambda k: family_of(k).sparse),
            reason=reason,
        )

    def _fastest(self, matches: Callable[[Kernel], bool]) -> Kernel | None:
        return min(filter(matches, self.times), key=self.times.__getitem__, default=None)


def decide(
    layers: Sequence[Layer],
    run: Callable[[], object],
    cache: TimingCache,
    device: torch.device,
    *,
    key: str | None = None,
    sparse: bool = True,
    progress: Progress = False,
) -> list[Entry]:
    """Choose a kernel for every layer, for the input that `run` uses.

    Layers are timed first, then the network with several combinations of kernels, and on a GPU with other kernels for
    one layer at a time: the fastest kernel of a layer alone may not be the fastest between its neighbours.

    Args:
        layers: the layers of the network.
        run: runs the network.
        cache: earlier timings.
        device: where the network runs.
        key: cache key of the network (see `timing_cache.network_key`). Default: do not cache network times.
        sparse: False restricts the choice to library kernels.
        progress: how to show the progress of timing. Default: not at all.
    """
    if not any(len(_candidates(layer, device, sparse)) > 1 for layer in layers):
        return []
    timed = time_layers(layers, run, cache, device, sparse, progress)
    if not timed:
        return []
    candidates = {"dense": [layer.best_dense for layer in timed]}
    for threshold in THRESHOLDS:
        chosen = [layer.ours_above(threshold) for layer in timed]
        if chosen not in candidates.values():
            candidates[f"above {threshold:g} x dense"] = chosen
    times = _network_times(candidates, timed, run, cache, device, key)
    best = min(times, key=times.__getitem__)
    chosen = candidates[best]
    if device.type == "cuda":
        chosen = _in_context(chosen, timed, run, cache, device, key)
    for layer, kernel in zip(timed, chosen, strict=True):
        layer.layer.use({**layer.layer.kernels, layer.size: kernel})
    return [
        layer.entry(kernel, _reason(layer, kernel, best, kernel != first))
        for layer, kernel, first in zip(timed, chosen, candidates[best], strict=True)
    ]


def all_dense(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of a plan after the network turned out to be fastest with all layers dense, compiled by Inductor."""
    reason = "the network is fastest dense, compiled by Inductor"
    return [replace(e, kernel=str(FALLBACK), sparse=False, time_ms=None, reason=reason) for e in entries]


def _network_times(
    candidates: dict[str, list[Kernel]],
    timed: list[LayerTimes],
    run: Callable[[], object],
    cache: TimingCache,
    device: torch.device,
    key: str | None,
) -> dict[str, float]:
    """Milliseconds of the network with each combination of kernels, measured or from the cache.

    Layers hold the packed tensors of all these kernels afterwards, and still those that other input sizes use.
    """
    ids = {name: jit.digest(*map(kernel_id, kernels)) for name, kernels in candidates.items()}
    known = None if key is None else cache.get(key, ids.values())
    if known is not None:
        return {name: known[described] for name, described in ids.items()}

    def on(kernels: list[Kernel]) -> Callable[[], object]:
        def call() -> object:
            for layer, kernel in zip(timed, kernels, strict=True):
                layer.layer.kernels = {layer.size: kernel}
            return run()

        return call

    before = [layer.layer.kernels for layer in timed]
    try:
        for layer, kernels in zip(timed, zip(*candidates.values(), strict=True), strict=True):
            layer.layer.hold([*layer.layer.kernels.values(), *kernels])
        times = measure({name: on(kernels) for name, kernels in candidates.items()}, device)
    finally:  # recordings of other input sizes read the packed tensors that these kernels need
        for layer, used in zip(timed, before, strict=True):
            layer.layer.kernels = used
    if key is not None:
        cache.put(key, {described: times[name] for name, described in ids.items()})
        cache.save()
    return times


def _in_context(
    chosen: list[Kernel],
    timed: list[LayerTimes],
    run: Callable[[], object],
    cache: TimingCache,
    device: torch.device,
    key: str | None,
) -> list[Kernel]:
    """These kernels, or others with which the network is faster, tried for one layer at a time and then together.

    A layer that is timed alone finds its weights in the cache of the GPU, and kernels like its own before and after it.
    Both measurements have keys of their own in the timing cache: times of different measurements do not compare.
    """
    trials = {f"{places} {kernel}": kernels for (places, kernel), kernels in _others(chosen, timed).items()}
    if not trials:
        return chosen
    try:
        times = _network_times({**trials, _CHOSEN: chosen}, timed, run, cache, device, key and f"{key} one by one")
        limit = (1 - _GAIN) * times[_CHOSEN]
        faster = sorted((name for name in trials if times[name] < limit), key=times.__getitem__)
        if not faster:
            return chosen
        together = list(chosen)
        for name in reversed(faster):  # the fastest kernel of a layer comes last
            changes = zip(trials[name], chosen, together, strict=True)
            together = [new if new != old else now for new, old, now in changes]
        last = {_CHOSEN: chosen, "the fastest one": trials[faster[0]], "together": together}
        times = _network_times(last, timed, run, cache, device, key and f"{key} together")
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        return chosen  # many networks are recorded at once, and there is a plan already
    return last[min(last, key=times.__getitem__)]


def _others(chosen: list[Kernel], timed: list[LayerTimes]) -> dict[tuple[tuple[int, ...], Kernel], list[Kernel]]:
    """Combinations with another of our kernels for all equal layers, by the places of these layers and the kernel.

    Only for layers that take a good part of the time, and with kernels that are not much slower alone.
    """
    equal: dict[object, list[int]] = {}
    for place, (layer, kernel) in enumerate(zip(timed, chosen, strict=True)):
        if kernel in layer.times:
            equal.setdefault((layer.shape, kernel, frozenset(layer.times.items())), []).append(place)
    total = sum(layer.times.get(kernel, 0.0) for layer, kernel in zip(timed, chosen, strict=True))
    found = {}
    for places in equal.values():
        times, kernel = timed[places[0]].times, chosen[places[0]]
        if len(places) * times[kernel] < _MIN_SHARE * total:
            continue
        ours = (other for other in times if other != kernel and not family_of(other).library)
        near = sorted((other for other in ours if times[other] <= _MAX_RATIO * times[kernel]), key=times.__getitem__)
        for other in near[:_MAX_TRIED]:
            found[tuple(places), other] = [other if place in places else k for place, k in enumerate(chosen)]
    return found


def time_layers(
    layers: Sequence[Layer],
    run: Callable[[], object],
    cache: TimingCache,
    device: torch.device,
    sparse: bool = True,
    progress: Progress = False,
) -> list[LayerTimes]:
    """Run the network and time the kernels of each layer on its first input that is not empty."""
    found: dict[int, LayerTimes] = {}
    bar = iter(tracked(layers, progress, "timing kernels"))  # layers are timed by hooks, in the order they run

    def time_one(layer: Layer, inputs: list[Tensor]) -> None:
        if id(layer) not in found:
            next(bar, None)
            found[id(layer)] = time_layer(layer, inputs, cache, device, sparse)

    _compile_kernels(layers, run, cache, device, sparse)
    visit(layers, run, time_one)
    for _ in bar:  # some layers may not have run
        pass
    cache.save()
    return [found[id(layer)] for layer in layers if id(layer) in found]


def visit(layers: Sequence[Layer], run: Callable[[], object], look: Callable[[Layer, list[Tensor]], object]) -> object:
    """Run the network, and show the inputs of each layer that are not empty before it runs. Returns the outputs.

    Calls of the network by other threads are not shown.
    """
    thread = threading.get_ident()

    def hook(layer: Layer, args: tuple[Any, ...]) -> None:
        if args[0].numel() and threading.get_ident() == thread:
            look(layer, [x.to(layer.dtype) if layer.has_weight else x for x in args if x is not None])

    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()


def _compile_kernels(
    layers: Sequence[Layer], run: Callable[[], object], cache: TimingCache, device: torch.device, sparse: bool
) -> None:
    """Compile all kernels that are going to be timed."""
    jobs: Jobs = {}
    visit(layers, run, lambda layer, inputs: jobs.update(compilations(layer, inputs, cache, device, sparse)))
    compile_all(jobs)


def compilations(layer: Layer, inputs: list[Tensor], cache: TimingCache, device: torch.device, sparse: bool) -> Jobs:
    """What must be compiled before the kernels of a layer are timed: nothing if the times are known."""
    if device.type != "cuda":
        return {}
    kernels = _candidates(layer, device, sparse, inputs)
    if cache.get(layer_key(layer, inputs), map(kernel_id, kernels)) is not None:
        return {}
    jobs = (family_of(kernel).compilation(inputs, layer.operation, kernel.variant) for kernel in kernels)
    return {(job.func, job.args): job for job in jobs if job is not None}


def compile_all(jobs: Jobs) -> None:
    """Compile kernels in several threads: one after the other takes minutes."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in [pool.submit(job) for job in jobs.values()]:
            if isinstance(done.exception(), BaseException) and not isinstance(done.exception(), EngineError):
                done.result()  # kernels that do not compile are reported when they are to run


def _candidates(
    layer: Layer, device: torch.device, sparse: bool, inputs: Sequence[Tensor] | None = None
) -> list[Kernel]:
    """The kernels to time: those that can run the layer, fit these inputs, and may be the fastest of their family."""
    found = [kernel for kernel in layer.available_kernels(device) if sparse or family_of(kernel).library]
    if inputs is None:
        return found
    fitting: dict[KernelFamily, list[str]] = {}
    for kernel in found:
        if (family := family_of(kernel)).fits(inputs, layer.operation, kernel.variant):
            fitting.setdefault(family, []).append(kernel.variant)
    return [
        Kernel(family.name, variant)
        for family, variants in fitting.items()
        for variant in family.promising(inputs, layer.operation, variants)
    ]


def time_layer(
    layer: Layer, inputs: list[Tensor], cache: TimingCache, device: torch.device, sparse: bool
) -> LayerTimes:
    """Time the kernels of a layer on an input."""
    kernels = _candidates(layer, device, sparse, inputs)
    key = layer_key(layer, inputs)
    ids = {kernel_id(kernel): kernel for kernel in kernels}
    times = cache.get(key, ids) if len(kernels) > 1 else {}
    if times is None:
        before = list(layer.kernels.values())
        layer.hold([*kernels, FALLBACK, *before])
        times = {kernel_id(kernel): time for kernel, time in _measured(layer, inputs, kernels, device).items()}
        layer.hold([*before, FALLBACK])
        cache.put(key, times)
    correct = {ids[described]: time for described, time in times.items() if time != float("inf")}
    size, shape = layer.operation.size(inputs[0]), layer.operation.describe(inputs[0])
    return LayerTimes(layer, int(size), shape, correct)


def _measured(layer: Layer, inputs: list[Tensor], kernels: list[Kernel], device: torch.device) -> dict[Kernel, float]:
    """Milliseconds of each kernel; infinite if it does not support this shape or its result is wrong.

    Inputs are converted to the layout of the kernel beforehand: neighbouring layers usually share it, and the times of
    whole networks include it. Kernels that failed for a temporary reason (no compiler, out of memory) are omitted.
    """
    results = partial(layer.operation.results, shape=inputs[0].shape)  # a small one may be wrong beside a large one
    expected = results(layer.run(inputs, FALLBACK))
    tolerance = _TOLERANCE.get(layer.dtype, 1e-3)
    calls, retry_later = {}, set()
    for kernel in kernels:
        given = family_of(kernel).laid_out(inputs, layer.operation)
        try:
            # cuDNN times its own algorithms when a shape runs for the first time.
            with turn(device) if family_of(kernel).library else nullcontext():
                got = layer.run(given, kernel)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, EngineError) or ran_out_of_memory(error):
                retry_later.add(kernel)
            continue
        if relative_error(results(got), expected) <= tolerance:
            calls[str(kernel)] = lambda kernel=kernel, given=given: layer.run(given, kernel)
    times = measure(calls, device)
    return {kernel: times.get(str(kernel), float("inf")) for kernel in kernels if kernel not in retry_later}


def _reason(layer: LayerTimes, kernel: Kernel, chosen: str, in_context: bool) -> str:
    if in_context:
        reason = "the network is faster with this kernel"
    elif kernel == layer.best:
        reason = "fastest"
    elif family_of(kernel).library:
        reason = "the network is faster with this layer dense"
    else:
        reason = f"the network is faster with our kernels {chosen}"
    return reason if layer.layer.is_2_4 or not layer.layer.has_weight else f"{reason}, not 2:4"
