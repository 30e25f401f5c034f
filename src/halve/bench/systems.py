"""What a compiled network is measured against: each system is made ready to be called on one batch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halve.bench.semi_structured import put_in_
from halve.engine.compiled import CUDA_GRAPH, Compiled
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import family_of
from halve.engine.plan import Entry, LayerTimes, time_layers
from halve.engine.recorded import Recordings
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError


@dataclass(frozen=True)
class Case:
    """What all systems start from: the masked model in its type, one batch beside it, and `halve.compile` of it."""

    masked: nn.Module
    inputs: tuple[Tensor, ...]
    compiled: Callable[[], Compiled]

    @property
    def batch(self) -> int:
        return len(self.inputs[0])

    @property
    def on_gpu(self) -> bool:
        return self.inputs[0].is_cuda


@dataclass(frozen=True)
class Ready:
    """A system at hand: `call` runs the batch; `settle` comes before it once, and allocates what a call needs."""

    call: Callable[[], Any]
    settle: Callable[[], Any]
    module: nn.Module  # holds the weights
    note: str | None = None
    plan: tuple[Entry, ...] = ()


def _eager(case: Case) -> Ready:
    def call() -> Any:
        return case.masked(*case.inputs)

    return Ready(call, call, case.masked)


def _compile(case: Case) -> Ready:
    return _by_inductor(case, mode="reduce-overhead")


def _compile_freezing(case: Case) -> Ready:
    # Both: the tracer reads the global setting, and the option tells this backend from the one without.
    options = {"freezing": True, "triton.cudagraphs": True}
    with torch._inductor.config.patch(freezing=True):
        return _by_inductor(case, options=options)


def _by_inductor(case: Case, **options: Any) -> Ready:
    model = copy.deepcopy(case.masked)
    fast = torch.compile(model, dynamic=False, **options)

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # what an earlier call gave may be overwritten
        return fast(*case.inputs)

    def settle() -> None:
        for _ in range(2):  # recorded, then replayed
            call()

    call()  # compiles
    return Ready(call, settle, model)


def _best_dense(case: Case) -> Ready:
    fast, _ = _on_kernels(case, lambda times: times.best_dense)
    return _recorded(fast, case)


def _halve_dense(case: Case) -> Ready:
    fast, kernels = _on_kernels(case, _our_dense)
    ours = sum(not family_of(kernel).library for kernel in kernels)
    if not ours:
        raise EngineError(f"our kernels cannot run any of its layers here: {fast.reason or 'unsupported shapes'}")
    return _recorded(fast, case, f"{ours} of {len(fast.layers)} layers on our kernels, the others as in best_dense")


def _our_dense(times: LayerTimes) -> Kernel:
    """Our fastest kernel with all weights, or the fastest library kernel if there is none."""
    return times.best_our_dense or times.best_dense


def _torch_semi_structured(case: Case) -> Ready:
    fast, _ = _on_kernels(case, lambda times: times.best_dense)
    return _recorded(fast, case, put_in_(fast, case.inputs))


def _on_kernels(case: Case, choose: Callable[[LayerTimes], Kernel]) -> tuple[Compiled, list[Kernel]]:
    """A copy of the compiled network, without recordings, whose layers run on the chosen kernels."""
    if not case.on_gpu:
        raise EngineError("needs a CUDA GPU")
    fast = copy.deepcopy(case.compiled())
    device = case.inputs[0].device
    timed = time_layers(fast.layers, lambda: fast(*case.inputs), TimingCache.of(device), device)
    kernels = [choose(times) for times in timed]
    for times, kernel in zip(timed, kernels, strict=True):
        times.layer.use({times.size: kernel})
    return fast, kernels


def _recorded(fast: Compiled, case: Case, note: str | None = None) -> Ready:
    """The network in a CUDA graph, like `halve` itself: inputs are copied in, outputs out."""
    recordings = Recordings()
    fast(*case.inputs)  # kernels are loaded and algorithms chosen before anything is recorded
    return Ready(lambda: recordings.replay(case.inputs), lambda: recordings.record(fast, case.inputs), fast, note)


def _halve(case: Case) -> Ready:
    fast = case.compiled()
    notes = [] if fast.reason is None else [f"runs dense: {fast.reason}"]

    def call() -> Any:
        return fast(*case.inputs)

    if not case.on_gpu:
        return Ready(call, call, fast, "; ".join(notes) or None)
    fast.warmup([case.batch])
    notes += [f"{name} {why}" for name, why in fast.plan.uncompiled.items() if name == CUDA_GRAPH]
    plan = tuple(fast.plan.batches.get(case.batch, ()))
    return Ready(call, lambda: fast.warmup([case.batch]), fast, "; ".join(notes) or None, plan)


SYSTEMS: dict[str, Callable[[Case], Ready]] = {
    "eager": _eager,
    "compile": _compile,
    "compile_freezing": _compile_freezing,
    "best_dense": _best_dense,
    "torch_semi_structured": _torch_semi_structured,
    "halve_dense": _halve_dense,
    "halve": _halve,
}


def weight_bytes(module: nn.Module) -> int:
    """Of all parameters and buffers, each storage once.

    >>> weight_bytes(nn.Linear(4, 2))
    40
    """
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*module.parameters(), *module.buffers()]
    }
    return sum(held.values())
