"""The times of layers: compile and time the kernels that may be the fastest for each."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halve.batches import Progress, tracked
from halve.engine.kernels.kernel import Kernel, KernelFamily, Layout
from halve.engine.kernels.registry import FALLBACK, family_of
from halve.engine.layer import Layer
from halve.engine.plan import Entry
from halve.engine.timing import measure, ran_out_of_memory
from halve.engine.timing_cache import TimingCache, kernel_id, layer_key
from halve.engine.turns import turn
from halve.engine.visit import visit
from halve.errors import EngineError
from halve.outputs import relative_error

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative error that a kernel may have; 1e-3 in other dtypes
Jobs = dict[object, Callable[[], object]]  # compilations of kernels, each once


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
    kernels = candidate_kernels(layer, device, sparse, inputs)
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


def candidate_kernels(
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
    kernels = candidate_kernels(layer, device, sparse, inputs)

    def measured() -> dict[Kernel, float]:
        before = list(layer.kernels.values())
        layer.hold([*kernels, FALLBACK, *before])
        times = _measured(layer, inputs, kernels, device)
        layer.hold([*before, FALLBACK])
        return times

    ids = {kernel: kernel_id(kernel) for kernel in kernels}
    times = cache.look_up(layer_key(layer, inputs), ids, measured) if len(kernels) > 1 else {}
    correct = {kernel: time for kernel, time in times.items() if time != float("inf")}
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
