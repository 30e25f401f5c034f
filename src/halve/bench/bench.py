"""Measure how fast a masked network runs, compiled by halve and by other systems."""

import contextlib
import functools
import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.batches import Progress, check_readable, tracked
from halve.bench.energy import energy_meter
from halve.bench.rounds import burst_timer, energy_mj, interleaved
from halve.bench.systems import SYSTEMS, Case, Prepared, systems_for, weight_bytes
from halve.cuda_graphs import autotuned_cudnn
from halve.engine.capture.purity import preserved_buffers
from halve.engine.compile import compile
from halve.engine.compiled import Compiled
from halve.engine.plan import Entry
from halve.errors import EngineError, OptionError, first_line
from halve.masks.apply import OnChanged, apply
from halve.masks.mask import MaskSet
from halve.modules import clone, convert_, unwrapped
from halve.outputs import relative_error
from halve.process_state import preserved_process_state

_TOLERANCE = 0.2  # relative error of outputs: far above rounding in half precision, far below a wrong network
_LONGEST_ERROR = 300  # characters
_NHWC = torch.channels_last


@dataclass(frozen=True)
class Measurement:
    """One system at one batch size: milliseconds per call, or the error that prevented it.

    Memory is the weights plus what a call allocates. Energy is that of the entire GPU, including idle power.
    """

    batch: int
    system: str
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    memory_bytes: int | None = None
    energy_mj_per_image: float | None = None
    error: str | None = None
    note: str | None = None  # where the system differs from its description
    round_ms: tuple[float, ...] = ()  # the median of each round; systems of one run share their rounds
    plan: tuple[Entry, ...] = ()  # only of `halve` and `halve_unmasked`: the kernel of each layer

    @property
    def images_per_second(self) -> float | None:
        return None if self.median_ms is None else 1e3 * self.batch / self.median_ms


@preserved_process_state()
def bench(
    model: nn.Module,
    masks: MaskSet,
    example: Tensor | tuple[Tensor, ...],
    *,
    batch_sizes: Sequence[int] = (1, 32, 256),
    dtype: torch.dtype = torch.float16,
    systems: Iterable[str] | None = None,
    seconds: float = 0.5,
    on_changed: OnChanged = "warn",
    while_timing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    progress: Progress = True,
) -> list[Measurement]:
    """Measure latency, memory and energy of the masked model, compared with other systems.

    Times are medians per call, including input checks and copies; inputs are already on the device. Systems are timed
    in interleaved rounds in random order. A system that fails, returns wrong outputs or is not available gets an
    `error` instead of times. The model is not changed. Resets torch.compile's caches if its systems are measured.

    Systems:
        - "eager": the model from `halve.apply`; channels last on a GPU, contiguous on a CPU.
        - "channels_last": the same, channels last on a CPU.
        - "compile": the same with torch.compile in mode "reduce-overhead".
        - "compile_freezing": the same with torch.compile, freezing (folds BatchNorm) and CUDA graphs.
        - "best_dense": halve's fused graph with the fastest dense kernel for each layer (PyTorch, cuDNN, cuBLAS).
        - "onnxruntime", "openvino": the model exported to ONNX, on a CPU. Needs the package, onnx and onnxscript.
        - "torch_semi_structured": best_dense with PyTorch's own 2:4 for Linear layers and 1x1 convolutions.
        - "halve_dense": best_dense with halve's kernels on dense weights where they can run a layer.
        - "halve_unmasked": the model from `halve.compile` without masks. Not measured by default.
        - "halve": the model from `halve.compile`.

    On a GPU, systems other than eager run as CUDA graphs. best_dense, torch_semi_structured and halve_dense need one.

    Args:
        model: the dense model.
        masks: from `halve.learn`, `halve.prune` or `halve.load`.
        example: images, or a tuple of inputs, repeated or cut to each batch size. Sets the device.
        batch_sizes: batch sizes to measure.
        dtype: what is computed in.
        systems: names from the list above. Default: all that run on the device.
        seconds: time spent on each system at each batch size, not counting compilation.
        on_changed: what to do if the weights are not those the masks were made for: "warn", "error" or "ignore".
        while_timing: makes a context that is entered when all systems of a batch size are prepared, and left when they
            have been timed. For processes that share a device: wait there until the others are quiet.
        progress: show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.

    Returns:
        One `Measurement` per batch size and system, in the order given.

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
    model = unwrapped(model)
    inputs = example if isinstance(example, tuple) else (example,)
    names = None if systems is None else list(dict.fromkeys(systems))
    sizes = list(dict.fromkeys(batch_sizes))
    _check_options(names, sizes, seconds, inputs)
    device = inputs[0].device
    names = [*systems_for(device)] if names is None else names
    memory_format = torch.contiguous_format

    def eager(with_masks: bool, dtype: torch.dtype, on_changed: OnChanged = "ignore") -> nn.Module:
        plain = apply(model, masks, on_changed=on_changed) if with_masks else clone(model)
        convert_(plain.eval().requires_grad_(False), dtype, device)
        return plain.to(memory_format=memory_format)

    masked = eager(True, dtype, on_changed)

    def compiled_with(masks: MaskSet | None) -> Compiled:
        first = _batch_of(inputs, sizes[0], dtype, memory_format)
        return compile(model, masks, first, dtype=dtype, on_changed="ignore", progress=False)

    @functools.cache
    def compiled() -> Compiled:
        return compiled_with(masks)

    @functools.cache
    def unmasked() -> Compiled:
        return compiled_with(None)

    found = []
    with torch.no_grad(), autotuned_cudnn(), _on(device):
        if device.type == "cuda":
            memory_format = _to_channels_last_(masked, inputs, dtype)
        for size in sizes:
            case = Case(masked, _batch_of(inputs, size, dtype, memory_format), compiled, unmasked, eager, dtype)
            found += _measure_batch(case, names, seconds, while_timing, progress)
    return found


def _check_options(systems: list[str] | None, batch_sizes: list[int], seconds: float, inputs: tuple[Any, ...]) -> None:
    if systems is not None and not systems:
        raise OptionError(f"systems must name at least one of {', '.join(SYSTEMS)}, got none")
    for name in systems or ():
        if name not in SYSTEMS:
            raise OptionError(f"unknown system {name!r}: systems must be among {', '.join(SYSTEMS)}")
    if not batch_sizes:
        raise OptionError("batch_sizes must hold at least one batch size, got none")
    for size in batch_sizes:
        if not isinstance(size, int) or size < 1:
            raise OptionError(f"batch_sizes must be positive integers, got {size!r}")
    if not seconds > 0:
        raise OptionError(f"seconds must be positive, got {seconds!r}")
    for x in inputs:
        if isinstance(x, Tensor):
            check_readable(x)
    if not inputs or not all(isinstance(x, Tensor) and x.dim() and len(x) for x in inputs):
        raise OptionError("example must be a tensor of images, or a tuple of tensors, as the model takes them")


def _to_channels_last_(masked: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> torch.memory_format:
    """Convert the model to channels last if it still runs then; returns the memory format it has now.

    Models with 5D weights stay contiguous, and so do models whose code calls `view` on images.
    """
    if not any(p.dim() == 5 for p in masked.parameters()):
        masked.to(memory_format=_NHWC)
        try:
            with preserved_buffers(masked):
                masked(*_batch_of(inputs, len(inputs[0]), dtype, _NHWC))
            return _NHWC
        except Exception:  # the model's own code; if it never runs, the eager system reports the error
            masked.to(memory_format=torch.contiguous_format)
    return torch.contiguous_format


def _measure_batch(
    case: Case,
    names: list[str],
    seconds: float,
    while_timing: Callable[[], AbstractContextManager[object]],
    progress: Progress,
) -> list[Measurement]:
    """Measure all systems on one batch."""
    batch, device = case.batch, case.inputs[0].device
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    prepared: dict[str, Prepared] = {}
    as_eager: list[str] = []  # masked systems whose outputs are the eager model's
    exact = False  # whether outputs of some system are those of the eager model in float32 only
    try:
        expected = _outputs(case.masked(*case.inputs))
    except Exception:  # the eager system reports the error
        expected = None
    for name in tracked(names, progress, f"batch {batch}: preparing"):
        try:
            system, results[name]["memory_bytes"], same = _prepare(name, case, expected)
            prepared[name] = system
            results[name] |= {"note": system.note, "plan": system.plan}
            exact |= not same
            if same and system.masked:
                as_eager.append(name)
        except Exception as error:
            results[name] = {"error": first_line(error, _LONGEST_ERROR)}
            _free_memory(device)
    if exact and expected is not None and _mismatch(expected, _exact_outputs(case, masked=True)) is not None:
        note = f"outputs in {str(case.dtype).removeprefix('torch.')} are not those of the model in float32"
        for name in as_eager:
            results[name]["note"] = "; ".join(filter(None, (results[name]["note"], note)))
    burst = burst_timer(device)
    calls = {name: system.call for name, system in prepared.items()}
    with while_timing():
        times, failed = interleaved(calls, burst, seconds=seconds, progress=progress, what=f"batch {batch}: timing")
        meter = energy_meter(device)
        for name, rounds in times.items():
            p10, median, p90 = (float(ms) for ms in np.percentile(list(itertools.chain(*rounds)), (10, 50, 90)))
            medians = tuple(float(np.median(one)) for one in rounds)
            results[name] |= {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "round_ms": medians}
            if meter is not None:
                used = energy_mj(calls[name], burst, meter, median)
                results[name]["energy_mj_per_image"] = None if used is None else used / batch
    for name, failure in failed.items():
        results[name] = {"error": first_line(failure, _LONGEST_ERROR)}
    prepared.clear()
    calls.clear()
    if any(name.startswith("compile") for name in names):
        torch.compiler.reset()  # its graphs hold memory, and it limits how often one model is recompiled
    _free_memory(device)
    return [Measurement(batch, name, **results[name]) for name in names]


def _prepare(name: str, case: Case, expected: list[Tensor] | None) -> tuple[Prepared, int | None, bool]:
    """Prepare a system and check its outputs; also returns its memory in bytes on a GPU, and what `_check` does."""
    device = case.inputs[0].device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes say what matters
        system = SYSTEMS[name](case)
        before = 0
        if case.on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        system.warm_up()
        memory = None
        if case.on_gpu:
            torch.cuda.synchronize(device)
            memory = weight_bytes(system.module) + torch.cuda.max_memory_allocated(device) - before
        outputs = _outputs(system.call())
        same = expected is None or _check(system, outputs, expected, case)
    return system, memory, same


def _check(system: Prepared, outputs: list[Tensor], expected: list[Tensor], case: Case) -> bool:
    """Whether outputs match the eager model's; raises if they match in no dtype. `expected`: of the masked model.

    Half precision may fail in the eager model alone, if folded weights fit into it and statistics of BatchNorm do not.
    A system that matches the model in single precision is right.
    """
    if not system.masked:
        expected = _outputs(case.eager(False, case.dtype)(*case.inputs))
    why = _mismatch(outputs, expected)
    if why is None:
        return True
    if case.dtype != torch.float32 and _mismatch(outputs, _exact_outputs(case, system.masked)) is None:
        return False
    raise EngineError(why)


def _exact_outputs(case: Case, masked: bool) -> list[Tensor]:
    """The outputs of the eager model in single precision."""
    inputs = [x.float() if x.is_floating_point() else x for x in case.inputs]
    return _outputs(case.eager(masked, torch.float32)(*inputs))


def _outputs(result: Any) -> list[Tensor]:
    """Copies of the floating-point tensors that a model returned. Some systems reuse the memory of their outputs."""
    return [x.clone() for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]


def _mismatch(got: list[Tensor], expected: list[Tensor]) -> str | None:
    """How outputs differ from the eager model's; None if they agree up to rounding."""
    if [x.shape for x in got] != [x.shape for x in expected]:
        shapes = [[tuple(x.shape) for x in outputs] for outputs in (got, expected)]
        return f"outputs have shapes {shapes[0]}, the eager model's have {shapes[1]}"
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if not bool(theirs.isfinite().all()):
            continue  # this model overflows in this dtype: there is nothing to compare with
        error = relative_error(ours, theirs)
        if error > _TOLERANCE:
            where = f"output {index}" if len(got) > 1 else "the output"
            return f"{where} differs from the eager model's by {error:.2g} (relative), allowed is {_TOLERANCE}"
    return None


def _batch_of(
    inputs: tuple[Tensor, ...], size: int, dtype: torch.dtype, memory_format: torch.memory_format
) -> tuple[Tensor, ...]:
    """The example, repeated or cut to `size` images, in the dtype that is computed in."""

    def resized(x: Tensor) -> Tensor:
        x = x[torch.arange(size, device=x.device) % len(x)]
        x = x.to(dtype) if x.is_floating_point() else x
        return x.contiguous(memory_format=memory_format) if x.dim() == 4 else x.contiguous()

    return tuple(resized(x) for x in inputs)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def _free_memory(device: torch.device) -> None:
    """Return the memory of deleted systems to the GPU."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
