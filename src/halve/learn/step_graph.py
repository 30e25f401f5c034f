"""A learning step recorded once as a CUDA graph and replayed.

A small network spends most of a step on launching kernels, not on running them; a replay launches them all at once.
What changes from step to step is written into fixed places first: images, noise, pace.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halve.batches import images_of, to_device
from halve.errors import DataError
from halve.learn.learner import Learner
from halve.learn.schedule import Pace

_WARM_UP = 3  # steps before recording: libraries choose and load their kernels


class Replay:
    """The gradient of one step, for batches of one shape."""

    def __init__(self, learner: Learner, images: Tensor) -> None:
        device = images.device
        self._learner = learner
        self._images = images.clone(memory_format=torch.preserve_format)
        self._gumbel = learner.draw(0)
        temperature, noise, guidance = (torch.ones((), device=device) for _ in range(3))
        self._pace = Pace(temperature, noise, guidance, lr=0.0)  # the optimizer is not recorded
        self._graph = torch.cuda.CUDAGraph()
        with best_algorithms(), _undisturbed():
            stream = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._step()
            torch.cuda.current_stream(device).wait_stream(stream)
            with torch.cuda.graph(self._graph, stream=stream):
                self._loss, self._gradient = self._step()

    def _step(self) -> tuple[Tensor, Tensor]:
        loss = self._learner.loss(self._images, self._gumbel, self._pace)
        (gradient,) = torch.autograd.grad(loss, self._learner.sampler.logits)
        return loss.detach(), gradient

    @classmethod
    def recorded(cls, learner: Learner, batch: Any) -> "Replay | str":
        """A replay for batches like this one, or the reason why there is none."""
        if not learner.sampler.logits.is_cuda:
            return "no GPU"
        if not learner.repeatable:
            return "your forward or objective may do something else in every step"
        try:
            return cls(learner, learner.varied(to_device(images_of(batch), learner.model), 0))
        except Exception as error:  # a model's own code may do what cannot be recorded, and raise anything
            torch.cuda.synchronize()
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"

    def fits(self, batch: Any) -> bool:
        """Whether a batch has the shape that was recorded."""
        try:
            return images_of(batch).shape == self._images.shape
        except DataError:
            return False

    def gradient_(self, batch: Any, step: int, pace: Pace[float]) -> Tensor:
        """Set the logits' gradient for a batch, and give its loss."""
        images = to_device(images_of(batch), self._learner.model)
        self._images.copy_(self._learner.varied(images, step))
        for place, drawn in zip(self._gumbel, self._learner.draw(step), strict=True):
            place.copy_(drawn)
        self._pace.temperature.fill_(pace.temperature)
        self._pace.noise.fill_(pace.noise)
        self._pace.guidance.fill_(pace.guidance)
        self._graph.replay()
        self._learner.sampler.logits.grad = self._gradient
        return self._loss.clone()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for all recordings: each stream that multiplies gets a workspace of its own from cuBLAS, for good."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def best_algorithms() -> Iterator[None]:
    """cuDNN tries its algorithms on each new shape and takes the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Python must not free tensors of other streams while a graph is recorded."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
