"""One step that changes nothing, before the first that counts: how long, how much memory, and does it fit at all."""

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
from halve.learn.schedule import Pace


class Estimate(NamedTuple):
    """What a run will take; steps are None where minutes are given."""

    seconds_per_step: float
    seconds: float
    peak_bytes: int
    steps: int | None


def try_step(learner: Learner, batch: Any, pace: Pace[float]) -> tuple[float, int]:
    """Seconds and peak bytes of one step; raises `ModelError` with a batch that fits where this one does not."""
    device = learner.sampler.logits.device
    repeats = 2 if device.type == "cuda" else 1  # the first one on a GPU loads and tunes kernels
    seconds = [_seconds(learner, batch, pace) for _ in range(repeats)][-1]
    if seconds is None:
        raise ModelError(_does_not_fit(learner, batch, pace))
    states = 2 * learner.sampler.logits.numel() * 4  # Adam's averages come on top
    return seconds, peak_bytes(device) + states


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds(learner: Learner, batch: Any, pace: Pace[float]) -> float | None:
    """How long a step takes; None when it does not fit. What it held is free afterwards, the error's frames too."""
    logits = learner.sampler.logits
    if logits.is_cuda:
        torch.cuda.reset_peak_memory_stats(logits.device)
    started = time.perf_counter()
    try:
        loss: Tensor = learner(batch, -1, pace)
        loss.backward()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        return time.perf_counter() - started
    except torch.OutOfMemoryError:
        return None
    finally:
        logits.grad = None


def _does_not_fit(learner: Learner, batch: Any, pace: Pace[float]) -> str:
    size = _length(batch)
    if not size:
        return "a batch does not fit into memory: give smaller batches, and accumulate= several of them"
    smaller = size // 2
    while smaller:
        gc.collect()
        torch.cuda.empty_cache()
        if _seconds(learner, _first(batch, size, smaller), pace) is not None:
            more = -(-size // smaller)
            return f"a batch of {size} does not fit into memory, one of {smaller} does: use it with accumulate={more}"
        smaller //= 2
    return "not even one image fits into memory together with the logits: mask fewer layers, or use a CPU"


def _length(batch: Any) -> int:
    """Images in a batch: the length of its first part."""
    if isinstance(batch, tuple | list) and batch:
        return _length(batch[0])
    parts = batch.values() if isinstance(batch, Mapping) else [batch]
    return next((len(part) for part in parts if isinstance(part, Tensor | list | np.ndarray)), 0)


def _first(batch: Any, size: int, count: int) -> Any:
    """The first images of a batch, with all that belongs to them."""
    if isinstance(batch, Mapping):
        return {key: _first(value, size, count) for key, value in batch.items()}
    if isinstance(batch, Tensor | list | np.ndarray) and len(batch) == size:
        return batch[:count]
    if isinstance(batch, tuple | list):
        items = [_first(item, size, count) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
