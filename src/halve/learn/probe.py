"""A dry run of one step before the first one: how long it takes, how much memory, and whether it fits at all."""

import gc
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halve.errors import ModelError
from halve.learn.batch_parts import length_of, part_of
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
        with learner.statistics.restored():
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
    size = length_of(batch)
    if not size:
        return "a batch does not fit into memory: use smaller batches with accumulate="
    smaller = size // 2
    while smaller:
        gc.collect()
        torch.cuda.empty_cache()
        if _seconds(learner, part_of(batch, 0, smaller), values) is not None:
            accumulate = -(-size // smaller)
            return (
                f"a batch of {size} images does not fit into memory, but {smaller} do: "
                f"use batches of {smaller} with accumulate={accumulate}"
            )
        smaller //= 2
    return "a single image does not fit into memory beside the logits: mask fewer layers, or use a CPU"
