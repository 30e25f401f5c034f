"""How fast a masked network runs, compiled by halve and by others, measured in one run."""

import contextlib
import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.batches import Progress
from halve.bench.energy import meter_of
from halve.bench.rounds import burst_on, energy_mj, in_turns
from halve.bench.systems import SYSTEMS, Case, Ready, weight_bytes
from halve.cuda_graphs import autotuned_cudnn
from halve.engine.capture.purity import preserved_buffers
from halve.engine.compile import compile
from halve.engine.compiled import Compiled
from halve.engine.plan import Entry
from halve.errors import EngineError, HalveError
from halve.masks.apply import OnChanged, apply
from halve.masks.mask import MaskSet
from halve.modules import convert_

_FAR = 0.2  # of the outputs' norm: more than half precision does, less than another network
_NHWC = torch.channels_last


@dataclass(frozen=True)
class Measurement:
    """One system on one batch size: times of one call, or the reason why there are none.

    Memory is that of the weights and of what a call allocates beside them; energy is that of the whole GPU.
    """

    batch: int
    system: str
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    memory_bytes: int | None = None
    energy_mj_per_image: float | None = None
    error: str | None = None
    note: str | None = None  # what is not as the system's name says
    plan: tuple[Entry, ...] = ()  # of `halve` on a GPU: which layer runs how

    @property
    def images_per_second(self) -> float | None:
        return None if self.median_ms is None else 1e3 * self.batch / self.median_ms


def bench(
    model: nn.Module,
    masks: MaskSet,
    example: Tensor | tuple[Tensor, ...],
    *,
    batch_sizes: Sequence[int] = (1, 32, 256),
    dtype: torch.dtype = torch.float16,
    systems: Iterable[str] = tuple(SYSTEMS),
    seconds: float = 0.5,
    on_changed: OnChanged = "warn",
    progress: Progress | None = None,
) -> list[Measurement]:
    """Milliseconds, memory and energy of the masked model in several systems, on the example's device.

    - "eager": the model as `halve.apply` gives it, channels last
    - "compile": the same by torch.compile in mode "reduce-overhead"
    - "compile_freezing": the same with weights as constants, which folds BatchNorm, and CUDA graphs
    - "best_dense": halve's graph, folded and fused, each layer in its fastest dense way (PyTorch, cuDNN, cuBLAS)
    - "torch_semi_structured": the same with Linear layers and 1x1 convolutions on PyTorch's own 2:4 products
    - "halve_dense": the same with each layer that our kernel can run on that kernel, with all weights
    - "halve": what `halve.compile` gives

    The last four run as CUDA graphs. Systems are called in turns, `seconds` each per batch size, on inputs that lie on
    the device already. One that fails, gives other outputs than the model or is not there has an `error` instead of
    times. On a CPU the three in the middle are not there, and `halve` runs dense.

    What torch.compile has compiled before is forgotten when its systems are measured. The model stays as it is.

    >>> import halve
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    >>> found = halve.bench(
    ...     model,
    ...     halve.prune(model),
    ...     torch.randn(1, 4, 8, 8),
    ...     batch_sizes=[1],
    ...     dtype=torch.float32,
    ...     systems=["eager", "halve", "best_dense"],
    ...     seconds=0.01,
    ... )
    >>> [(one.system, one.median_ms is not None, one.error) for one in found]
    [('eager', True, None), ('halve', True, None), ('best_dense', False, 'needs a CUDA GPU')]
    """
    chosen = list(dict.fromkeys(systems))
    for name in chosen:
        if name not in SYSTEMS:
            raise EngineError(f"no system is called {name!r}; there are {', '.join(SYSTEMS)}")
    sizes = list(dict.fromkeys(batch_sizes))
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise EngineError(f"batch sizes are whole numbers from 1 on, not {size!r}")
    if not chosen or not sizes or not seconds > 0:
        raise EngineError("there is nothing to measure: give at least one system, one batch size and some time")
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(x, Tensor) and x.dim() and len(x) for x in inputs):
        raise EngineError("the example must be a tensor of images, or a tuple of tensors, as the model takes them")
    device = inputs[0].device
    masked = apply(model, masks, on_changed=on_changed).eval().requires_grad_(False)
    convert_(masked, dtype, device)
    fast: list[Compiled] = []

    def compiled() -> Compiled:
        if not fast:
            first = _batch_of(inputs, sizes[0], dtype, _NHWC)
            fast.append(compile(model, masks, first, dtype=dtype, on_changed="ignore"))
        return fast[0]

    found = []
    with torch.no_grad(), autotuned_cudnn(), _on(device):
        order = _put_in_order_(masked, inputs, dtype)
        for size in sizes:
            case = Case(masked, _batch_of(inputs, size, dtype, order), compiled)
            found += _measured(case, chosen, seconds, progress)
    return found


def _put_in_order_(masked: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> torch.memory_format:
    """Channels last, where the model's code bears it: volumes have no such order, and views of images may not fit."""
    if not any(p.dim() == 5 for p in masked.parameters()):
        masked.to(memory_format=_NHWC)
        try:
            with preserved_buffers(masked):
                masked(*_batch_of(inputs, len(inputs[0]), dtype, _NHWC))
            return _NHWC
        except Exception:  # the model's own code: the eager system will say so if it does not run at all
            masked.to(memory_format=torch.contiguous_format)
    return torch.contiguous_format


def _measured(case: Case, names: list[str], seconds: float, progress: Progress | None) -> list[Measurement]:
    """All systems on one batch."""
    batch, device = case.batch, case.inputs[0].device
    told: dict[str, dict[str, Any]] = {name: {} for name in names}
    ready: dict[str, Ready] = {}
    try:
        expected = _outputs(case.masked(*case.inputs))
    except Exception:  # the eager system will say so
        expected = None
    for name in progress(names, f"batch {batch}: making ready") if progress else names:
        try:
            ready[name], told[name]["memory_bytes"] = _prepared(name, case, expected)
            told[name] |= {"note": ready[name].note, "plan": ready[name].plan}
        except Exception as error:
            told[name] = {"error": _reason(error)}
            _let_go(device)
    burst = burst_on(device)
    calls = {name: system.call for name, system in ready.items()}
    times, failed = in_turns(calls, burst, seconds=seconds, progress=progress, what=f"batch {batch}: timing")
    meter = meter_of(device)
    for name, all_ms in times.items():
        p10, median, p90 = (float(ms) for ms in np.percentile(all_ms, (10, 50, 90)))
        told[name] |= {"median_ms": median, "p10_ms": p10, "p90_ms": p90}
        if meter is not None:
            used = energy_mj(calls[name], burst, meter, median)
            told[name]["energy_mj_per_image"] = None if used is None else used / batch
    for name, why in failed.items():
        told[name] = {"error": _reason(why)}
    ready.clear()
    calls.clear()
    if any(name.startswith("compile") for name in names):
        torch.compiler.reset()  # its graphs hold memory, and it takes only so many shapes of one model
    _let_go(device)
    return [Measurement(batch, name, **told[name]) for name in names]


def _prepared(name: str, case: Case, expected: list[Tensor] | None) -> tuple[Ready, int | None]:
    """The system, checked against the model's own outputs, and its memory where that can be told."""
    device = case.inputs[0].device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters of them is in the notes
        system = SYSTEMS[name](case)
        before = 0
        if case.on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        system.settle()
        memory = None
        if case.on_gpu:
            torch.cuda.synchronize(device)
            memory = weight_bytes(system.module) + torch.cuda.max_memory_allocated(device) - before
        outputs = _outputs(system.call())
    if expected is not None and (why := _differing(outputs, expected)):
        raise EngineError(why)
    return system, memory


def _outputs(result: Any) -> list[Tensor]:
    """Floating tensors of a model's result, copied: some systems use their memory again."""
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
    return [x.float().clone() for x in leaves]


def _differing(got: list[Tensor], expected: list[Tensor]) -> str | None:
    """Why outputs are not those of the model; None where they are, up to what a type's precision does."""
    if [x.shape for x in got] != [x.shape for x in expected]:
        shapes = [tuple(x.shape) for x in got], [tuple(x.shape) for x in expected]
        return f"gives outputs of shapes {shapes[0]}, the model {shapes[1]}"
    for ours, theirs in zip(got, expected, strict=True):
        if not bool(theirs.isfinite().all()):
            continue  # the type is too small for this model: nothing to compare with
        distance = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        if not distance < _FAR:
            return f"gives other outputs than the model: their relative distance is {distance:.2g}"
    return None


def _batch_of(
    inputs: tuple[Tensor, ...], size: int, dtype: torch.dtype, order: torch.memory_format
) -> tuple[Tensor, ...]:
    """The example's first rows, repeated to a batch, in the type that is computed in."""

    def varied(x: Tensor) -> Tensor:
        x = x[torch.arange(size, device=x.device) % len(x)]
        x = x.to(dtype) if x.is_floating_point() else x
        return x.contiguous(memory_format=order) if x.dim() == 4 else x.contiguous()

    return tuple(varied(x) for x in inputs)


def _reason(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return text if isinstance(error, HalveError) else f"{type(error).__name__}: {text}".rstrip(": ")


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def _let_go(device: torch.device) -> None:
    """Memory of systems that are gone, for those to come."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
