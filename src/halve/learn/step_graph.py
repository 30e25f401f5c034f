"""A learning step, recorded once as a CUDA graph and replayed.

Small networks spend most of a step launching kernels. A replay launches them all at once; what changes from step to
step (images, noise, scheduled values) is copied into fixed buffers first.
"""

from typing import Any

import torch
from torch import Tensor

from halve.batches import images_of, to_device
from halve.cuda_graphs import autotuned_cudnn, record
from halve.errors import DataError, first_line
from halve.learn.learner import Learner
from halve.learn.schedule import StepValues

_WARM_UP = 3


class StepGraph:
    """The gradient of one step, for batches of one shape."""

    def __init__(self, learner: Learner, images: Tensor) -> None:
        device = images.device
        self._learner = learner
        self._images = images.clone(memory_format=torch.preserve_format)
        self._gumbel = learner.draw(0)
        temperature, noise, guidance = (torch.ones((), device=device) for _ in range(3))
        self._values = StepValues(temperature, noise, guidance, lr=0.0)  # the optimizer is not recorded
        with autotuned_cudnn(), learner.statistics.restored():
            self._graph, recorded = record(self._step, device, warmups=_WARM_UP)
        self._loss: Tensor = recorded[0]
        self._gradient: Tensor = recorded[1]

    def _step(self) -> tuple[Tensor, Tensor]:
        loss = self._learner.loss(self._images, self._gumbel, self._values)
        (gradient,) = torch.autograd.grad(loss, self._learner.sampler.logits)
        return loss.detach(), gradient

    @classmethod
    def recorded(cls, learner: Learner, batch: Any) -> "StepGraph | str":
        """Record a step for batches of this shape; returns the reason if that is not possible."""
        if not learner.sampler.logits.is_cuda:
            return "no GPU"
        if not learner.repeatable:
            return "a custom forward or objective may do different work in every step"
        try:
            images = learner.augmented(to_device(images_of(batch), learner.model), 0)
            return cls(learner, images) if isinstance(images, Tensor) else "batches are lists of images of any sizes"
        except Exception as error:  # the model's code may do what cannot be recorded, and raise anything
            torch.cuda.synchronize()
            return first_line(error)

    def fits(self, batch: Any) -> bool:
        """Whether a batch has the recorded shape."""
        try:
            images = images_of(batch)
        except DataError:
            return False
        return isinstance(images, Tensor) and images.shape == self._images.shape

    def gradient_(self, batch: Any, step: int, values: StepValues[float]) -> Tensor:
        """Set the logits' gradient for a batch and return its loss."""
        images = to_device(images_of(batch), self._learner.model)
        self._images.copy_(self._learner.augmented(images, step))
        for place, drawn in zip(self._gumbel, self._learner.draw(step), strict=True):
            place.copy_(drawn)
        self._values.temperature.fill_(values.temperature)
        self._values.noise.fill_(values.noise)
        self._values.guidance.fill_(values.guidance)
        self._graph.replay()
        self._learner.sampler.logits.grad = self._gradient
        return self._loss.clone()
