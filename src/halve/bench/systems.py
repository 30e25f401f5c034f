"""The systems that `halve.bench` compares. Each is prepared for one batch, then timed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halve.bench.onnx_runtimes import Run, onnxruntime_call, openvino_call
from halve.bench.semi_structured import replace_layers_
from halve.engine import inductor
from halve.engine.compiled import CUDA_GRAPH, INDUCTOR, JOINS, SPARSE, Compiled
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import family_of
from halve.engine.layer_times import LayerTimes, time_layers
from halve.engine.plan import Entry
from halve.engine.recorded import Recordings
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError


@dataclass(frozen=True)
class Case:
    """What every system gets: the masked model in the compute dtype, one batch, and the compiled model."""

    masked: nn.Module
    inputs: tuple[Tensor, ...]
    compiled: Callable[[], Compiled]
    unmasked: Callable[[], Compiled]  # compiled without masks
    eager: Callable[[bool, torch.dtype], nn.Module]  # the model with masks (True) or without, in a dtype
    dtype: torch.dtype  # what is computed in; the inputs may all be integers

    @property
    def batch(self) -> int:
        return len(self.inputs[0])

    @property
    def on_gpu(self) -> bool:
        return self.inputs[0].is_cuda


@dataclass(frozen=True)
class Prepared:
    """A system that can be timed. `call` runs the batch; `warm_up` runs once before it and allocates memory."""

    call: Callable[[], Any]
    warm_up: Callable[[], Any]
    module: nn.Module  # owns the weights
    note: str | None = None
    plan: tuple[Entry, ...] = ()
    masked: bool = True  # computes the masked model, not the dense one


def _eager(case: Case) -> Prepared:
    def call() -> Any:
        return case.masked(*case.inputs)

    return Prepared(call, call, case.masked)


def _channels_last(case: Case) -> Prepared:
    _check_on_cpu(case, "eager is channels last on a GPU")
    model = copy.deepcopy(case.masked).to(memory_format=torch.channels_last)
    inputs = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in case.inputs]

    def call() -> Any:
        return model(*inputs)

    return Prepared(call, call, model)


def _onnxruntime(case: Case) -> Prepared:
    return _exported(case, onnxruntime_call)


def _openvino(case: Case) -> Prepared:
    return _exported(case, openvino_call)


def _exported(case: Case, prepare: Callable[..., Run]) -> Prepared:
    _check_on_cpu(case, "measured on CPUs only")
    call = prepare(case.masked, case.inputs)
    return Prepared(call, call, case.masked)


def _check_on_cpu(case: Case, why_not: str) -> None:
    if case.on_gpu:
        raise EngineError(why_not)


def _compile(case: Case) -> Prepared:
    return _torch_compile(case, mode="reduce-overhead")


def _compile_freezing(case: Case) -> Prepared:
    # Set freezing twice: tracing reads the global config, and the option makes Dynamo compile again.
    options = {"freezing": True, "triton.cudagraphs": case.on_gpu}
    with torch._inductor.config.patch(freezing=True):
        return _torch_compile(case, options=options)


def _torch_compile(case: Case, **options: Any) -> Prepared:
    inductor.load()
    model = copy.deepcopy(case.masked)
    fast = torch.compile(model, dynamic=False, **options)

    def call() -> Any:
        if case.on_gpu:
            torch.compiler.cudagraph_mark_step_begin()  # outputs of earlier calls may be overwritten
        return fast(*case.inputs)

    def warm_up() -> None:
        for _ in range(2):  # the first records a CUDA graph, the second replays it
            call()

    call()  # compiles
    return Prepared(call, warm_up, model)


def _best_dense(case: Case) -> Prepared:
    return _recorded(_with_kernels(case, lambda times: times.best_dense).network, case)


def _halve_dense(case: Case) -> Prepared:
    fast, timed, kernels = _with_kernels(case, _our_dense)
    ours = sum(not family_of(kernel).library for kernel in kernels)
    entries = [times.entry(kernel, "") for times, kernel in zip(timed, kernels, strict=True)]
    if joins := fast.faster_joins(case.inputs, entries, sparse=False):
        fast.join(case.inputs, joins)
    if not ours:
        raise EngineError(f"no layer can run on our kernels: {fast.reason or 'unsupported shapes'}")
    return _recorded(fast, case, f"{ours} of {len(fast.layers)} layers on our kernels, the others as in best_dense")


def _our_dense(times: LayerTimes) -> Kernel:
    """Our fastest kernel on the dense weight, or the fastest library kernel if we have none."""
    return times.best_our_dense or times.best_dense


def _torch_semi_structured(case: Case) -> Prepared:
    fast = _with_kernels(case, lambda times: times.best_dense).network
    return _recorded(fast, case, replace_layers_(fast, case.inputs))


class _OnKernels(NamedTuple):
    network: Compiled
    timed: list[LayerTimes]
    kernels: list[Kernel]


def _with_kernels(case: Case, choose: Callable[[LayerTimes], Kernel]) -> _OnKernels:
    """A copy of the compiled network with other kernels, and those kernels. The copy has no CUDA graphs."""
    if not case.on_gpu:
        raise EngineError("needs a CUDA GPU")
    fast = copy.deepcopy(case.compiled())
    device = case.inputs[0].device
    timed = time_layers(fast.layers, lambda: fast(*case.inputs), TimingCache.of(device), device)
    kernels = [choose(times) for times in timed]
    for times, kernel in zip(timed, kernels, strict=True):
        times.layer.use({times.size: kernel})
    return _OnKernels(fast, timed, kernels)


def _recorded(fast: Compiled, case: Case, note: str | None = None) -> Prepared:
    """The network as a CUDA graph. Like in `halve` itself, inputs and outputs are copied."""
    recordings = Recordings()
    fast(*case.inputs)  # load kernels and pick algorithms before recording
    return Prepared(lambda: recordings.replay(case.inputs), lambda: recordings.record(fast, case.inputs), fast, note)


def _halve(case: Case) -> Prepared:
    return _planned(case, case.compiled())


def _halve_unmasked(case: Case) -> Prepared:
    return replace(_planned(case, case.unmasked()), masked=False)


def _planned(case: Case, fast: Compiled) -> Prepared:
    """The compiled network with its plan for this batch size."""
    notes = [] if fast.reason is None else [f"runs dense: {fast.reason}"]

    def call() -> Any:
        return fast(*case.inputs)

    fast.warmup([case.batch])
    told = (CUDA_GRAPH, INDUCTOR, JOINS, SPARSE)
    notes += [f"{name} {why}" for name, why in fast.plan.uncompiled.items() if name in told]
    plan = tuple(fast.plan.batches.get(case.batch, ()))
    return Prepared(call, lambda: fast.warmup([case.batch]), fast, "; ".join(notes) or None, plan)


SYSTEMS: dict[str, Callable[[Case], Prepared]] = {
    "eager": _eager,
    "channels_last": _channels_last,
    "compile": _compile,
    "compile_freezing": _compile_freezing,
    "best_dense": _best_dense,
    "torch_semi_structured": _torch_semi_structured,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "halve_dense": _halve_dense,
    "halve_unmasked": _halve_unmasked,
    "halve": _halve,
}
DENSE = ("best_dense", "compile", "compile_freezing", "onnxruntime", "openvino")  # what halve should be faster than
_ON_CPU = ("eager", "channels_last", "compile_freezing", "onnxruntime", "openvino", "halve")
_ON_GPU = ("eager", "compile", "compile_freezing", "best_dense", "torch_semi_structured", "halve_dense", "halve")


def systems_for(device: torch.device) -> tuple[str, ...]:
    """The systems that can be compared on a device.

    >>> systems_for(torch.device("cpu"))
    ('eager', 'channels_last', 'compile_freezing', 'onnxruntime', 'openvino', 'halve')
    """
    return _ON_GPU if device.type == "cuda" else _ON_CPU


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, also of joined layers. Shared storage counts once.

    >>> weight_bytes(nn.Linear(4, 2))
    40
    """
    tensors = module.tensors() if isinstance(module, Compiled) else [*module.parameters(), *module.buffers()]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values())
