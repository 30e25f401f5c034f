"""Choose whether Inductor compiles a network: where that is faster, with the planned kernels or all layers dense."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from halve.engine.compiled_body import CompiledBody
from halve.engine.inductor import compile_body
from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK
from halve.engine.layer import Layer
from halve.engine.plan import Entry
from halve.engine.timing import measure
from halve.engine.timing_cache import TimingCache, kernel_id
from halve.errors import EngineError

MAX_SECONDS = 300.0  # of compiling for one network; what begins before is finished
LEAST_SHARE = 0.03  # of the network's time between its layers: for less, Inductor is not tried
LIBRARY_SHARE = 0.7  # of the time of dense layers that Inductor needs at least: it fuses activations. Measured: 0.77


@dataclass(frozen=True)
class Choice:
    """The fastest form of a network for one input shape."""

    kernels: Mapping[Layer, Kernel]
    run: CompiledBody | None = None  # None: eager, with these kernels
    seconds: float = 0.0  # spent on compiling
    failed: str | None = None  # why Inductor could not compile the network as planned


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of all layers together, each timed alone: on the planned kernels, and on the fastest of libraries.

    Layers that have only one kernel are not timed, and count as 0. `dense_ms` only counts layers with weights: Inductor
    has other kernels for pooling.
    """

    planned_ms: float
    dense_ms: float

    def hopeless(self, network_ms: float) -> set[str]:
        """The forms that cannot be faster than `network_ms`, so that minutes of compiling are saved.

        Inductor only speeds up what lies between the layers. If all layers are dense, they alone take most of
        `dense_ms`: what follows a convolution there may be fused with the next operations instead.

        >>> LayerTime(planned_ms=0.99, dense_ms=1.7).hopeless(network_ms=1.0) == {"inductor", "inductor dense"}
        True
        >>> LayerTime(planned_ms=0.6, dense_ms=0.7).hopeless(network_ms=1.0)
        set()
        """
        found = set()
        if network_ms - self.planned_ms < LEAST_SHARE * network_ms:
            found.add("inductor")
        if LIBRARY_SHARE * self.dense_ms > network_ms:
            found.add("inductor dense")
        return found


def choose(
    body: GraphModule,
    inputs: tuple[Tensor, ...],
    kernels: Mapping[Layer, Kernel],
    cache: TimingCache,
    key: str | None,
    layers: LayerTime | None = None,
) -> Choice:
    """Time the network as planned against itself compiled by Inductor, and against Inductor with all layers dense.

    Args:
        body: the fused network, whose layers use `kernels`.
        inputs: inputs in the compute dtype.
        kernels: the planned kernel of each layer for these inputs.
        cache: earlier timings.
        key: cache key of the network. Default: do not cache.
        layers: how long the layers alone take. Forms that cannot be faster by that are not compiled. Default: unknown.
    """
    device = inputs[0].device
    dense = dict.fromkeys(kernels, FALLBACK)
    candidates = {"inductor": kernels, "inductor dense": dense} if kernels != dense else {"inductor": kernels}
    described = jit.digest(*map(kernel_id, kernels.values()))
    ids = {f"{name} {described}": name for name in ("eager", *candidates)}
    known = None if key is None else cache.get(key, ids)
    seconds, runs, failed = 0.0, {}, None
    if known is None:
        calls: dict[str, Callable[[], Any]] = {"eager": partial(body, *inputs)}
        excluded = set()
        for name, chosen in candidates.items():
            if layers is not None and name in layers.hopeless(min(measure(calls, device).values())):
                excluded.add(name)
                continue
            started = time.perf_counter()
            try:
                runs[name], took = compile_body(body, chosen, inputs)
                calls[name] = partial(runs[name], *inputs)
            except EngineError as error:
                failed, took = failed or str(error), time.perf_counter() - started
                excluded.add(name)
            seconds += took
        times = dict.fromkeys(excluded, math.inf) | measure(calls, device)
        if key is not None and failed is None:
            cache.put(key, {one: times[name] for one, name in ids.items()})
            cache.save()
    else:
        times = {ids[one]: ms for one, ms in known.items()}
    best = min(times, key=times.__getitem__)
    if best == "eager":
        return Choice(kernels, seconds=seconds, failed=failed)
    if best not in runs:
        started = time.perf_counter()
        try:
            runs[best], seconds = compile_body(body, candidates[best], inputs)
        except EngineError as error:
            return Choice(kernels, seconds=time.perf_counter() - started, failed=str(error))
    return Choice(candidates[best], runs[best], seconds, failed)


def all_dense(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of a plan after the network turned out to be fastest with all layers dense, compiled by Inductor."""
    reason = "the network is fastest dense, compiled by Inductor"
    return [replace(e, kernel=str(FALLBACK), sparse=False, time_ms=None, reason=reason) for e in entries]
