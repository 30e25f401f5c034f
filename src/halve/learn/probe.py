"""A dry run of one step before the first one: how long it takes, how much memory, and whether it fits at all."""

import gc
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halve.errors import ModelError
from halve.learn.learner import Learner
from halve.learn.schedule import StepValues
from halve.progress import duration


class Estimate(NamedTuple):
    """What a run will take; `steps` is None if the budget is in minutes."""

    seconds_per_step: float
    seconds: float
    peak_bytes: int
    steps: int | None

    def __str__(self) -> str:
        steps = "" if self.steps is None else f"{self.steps} steps, "
        total = f"about {duration(self.seconds)} ({self.seconds_per_step:.2f} s per step)"
        return f"{steps}{total}, {self.peak_bytes / 1e9:.2f} GB of memory"


def probe_step(learner: Learner, batch: Any, values: StepValues[float]) -> tuple[float, int]:
    """Return seconds and peak bytes of one step, leaving the learner unchanged.

    Raises `ModelError` if the batch does not fit into memory, and names a batch size that does.
    """
    device = learner.sampler.logits.device
    repeats = 2 if device.type == "cuda" else 1  # the first one on a GPU loads and tunes kernels
    seconds = [_seconds(learner, batch, values) for _ in range(repeats)][-1]
    if seconds is None:
        raise ModelError(_out_of_memory(learner, batch, values))
    states = 2 * learner.sampler.logits.numel() * 4  # Adam's averages do not exist yet
    return seconds, peak_bytes(device) + states


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds(learner: Learner, batch: Any, values: StepValues[float]) -> float | None:
    """Time of a step; None if it ran out of memory. All memory is free again when this returns."""
    logits = learner.sampler.logits
    if logits.is_cuda:
        torch.cuda.reset_peak_memory_stats(logits.device)
    started = time.perf_counter()
    try:
        loss: Tensor = learner(batch, -1, values)
        loss.backward()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        return time.perf_counter() - started
    except torch.OutOfMemoryError:
        return None
    finally:
        logits.grad = None


def _out_of_memory(learner: Learner, batch: Any, values: StepValues[float]) -> str:
    size = _length(batch)
    if not size:
        return "a batch does not fit into memory: use smaller batches with accumulate="
    smaller = size // 2
    while smaller:
        gc.collect()
        torch.cuda.empty_cache()
        if _seconds(learner, _first(batch, size, smaller), values) is not None:
            accumulate = -(-size // smaller)
            return (
                f"a batch of {size} images does not fit into memory, but {smaller} do: "
                f"use batches of {smaller} with accumulate={accumulate}"
            )
        smaller //= 2
    return "a single image does not fit into memory beside the logits: mask fewer layers, or use a CPU"


def _length(batch: Any) -> int:
    """Number of images in a batch: the length of its first part."""
    if isinstance(batch, tuple | list) and batch:
        return _length(batch[0])
    parts = batch.values() if isinstance(batch, Mapping) else [batch]
    return next((len(part) for part in parts if isinstance(part, Tensor | list | np.ndarray)), 0)


def _first(batch: Any, size: int, count: int) -> Any:
    """The first images of a batch, with their labels."""
    if isinstance(batch, Mapping):
        return {key: _first(value, size, count) for key, value in batch.items()}
    if isinstance(batch, Tensor | list | np.ndarray) and len(batch) == size:
        return batch[:count]
    if isinstance(batch, tuple | list):
        items = [_first(item, size, count) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
