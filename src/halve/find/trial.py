"""One step that changes nothing, before the first that counts: how long, how much memory, and does it fit at all."""

import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halve.errors import DataError, ModelError
from halve.find.batches import images_of
from halve.find.learner import Learner


class Estimate(NamedTuple):
    """What a run will take; seconds are None where its length is not known."""

    seconds_per_step: float
    seconds: float | None
    peak_bytes: int
    steps: int | None


def try_step(learner: Learner, batch: Any, temperature: float) -> tuple[float, int]:
    """Seconds and peak bytes of one step; raises `ModelError` with a batch that fits where this one does not."""
    device = learner.sampler.logits.device
    repeats = 2 if device.type == "cuda" else 1  # the first one on a GPU loads and tunes kernels
    seconds = 0.0
    try:
        for _ in range(repeats):
            started = time.perf_counter()
            _run(learner, batch, temperature)
            seconds = time.perf_counter() - started
    except torch.OutOfMemoryError as error:
        learner.sampler.logits.grad = None
        raise ModelError(_does_not_fit(learner, batch, temperature)) from error
    finally:
        learner.sampler.logits.grad = None
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


def _run(learner: Learner, batch: Any, temperature: float) -> None:
    if learner.sampler.logits.is_cuda:
        torch.cuda.reset_peak_memory_stats(learner.sampler.logits.device)
    loss: Tensor = learner(batch, -1, temperature)
    loss.backward()
    if learner.sampler.logits.is_cuda:
        torch.cuda.synchronize(learner.sampler.logits.device)


def _does_not_fit(learner: Learner, batch: Any, temperature: float) -> str:
    try:
        images = images_of(batch)
    except DataError:
        return "a batch does not fit into the GPU's memory: give smaller batches and accumulate= several of them"
    size = len(images)
    smaller = size // 2
    while smaller:
        torch.cuda.empty_cache()
        try:
            part = batch[:smaller] if isinstance(batch, Tensor) else images[:smaller]
            _run(learner, part, temperature)
            more = -(-size // smaller)
            return f"a batch of {size} does not fit into the GPU's memory, one of {smaller} does: use accumulate={more}"
        except torch.OutOfMemoryError:
            smaller //= 2
        finally:
            learner.sampler.logits.grad = None
    return "not even one image fits into the GPU's memory together with the logits: mask fewer layers, or use a CPU"
