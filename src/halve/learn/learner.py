"""The learner: a module that owns the logits and runs the frozen model with sampled weights. DDP wraps it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Forward, images_of, run, to_device
from halve.errors import LearningError, ModelError, listed
from halve.learn.augment import augmented
from halve.learn.objective import DISTILLATIONS, Objective, Views, watching
from halve.learn.sampling import Sampler, generator_of
from halve.learn.schedule import Pace


class Learner(nn.Module):
    """Loss of one sampled mask on one batch.

    The frozen model is held outside of the module tree, so that the logits are the learner's only parameter: nothing is
    registered on the model, and DDP has one tensor to average.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        objective: Objective,
        blocks: list[str],
        *,
        forward: Forward | None = None,
        dense: bool = True,
        hard: bool = True,
        seed: int = 0,
        rank: int = 0,
        autocast: torch.dtype | None = None,
        augment: bool = False,
    ) -> None:
        super().__init__()
        self.sampler, self.objective, self.blocks = sampler, objective, blocks
        self._call = Call(model, forward)
        self._dense, self._hard = dense, hard
        self._seed, self._rank, self._autocast, self._augment = seed, rank, autocast, augment

    @property
    def model(self) -> nn.Module:
        """The frozen model."""
        return self._call.inner

    @property
    def repeatable(self) -> bool:
        """Whether every step does the same work: halve's own objectives on images, and no forward of the user's."""
        return self.objective in DISTILLATIONS and not self._call.custom

    def forward(self, batch: Any, step: int, pace: Pace[float], micro: int = 0) -> Tensor:
        """The loss of the batch; `micro` counts the batches of one step when gradients are accumulated."""
        return self.loss(self.varied(batch, step, micro), self.draw(step, micro), pace)

    def draw(self, step: int, micro: int = 0) -> list[Tensor]:
        """The noise of one step."""
        return self.sampler.draw(self._seed, step, self._rank + 1000 * micro)

    def varied(self, batch: Any, step: int, micro: int = 0) -> Any:
        """The batch, its images augmented where that is asked for."""
        if not self._augment:
            return batch
        images = to_device(images_of(batch), self.model)
        if images.dim() != 4 or min(images.shape[2:]) < 8:
            return images
        generator = generator_of(images.device, self._seed + 1, step, self._rank + 1000 * micro)
        return augmented(images, generator)

    def loss(self, batch: Any, gumbel: list[Tensor], pace: Pace[Any]) -> Tensor:
        """The loss of a batch as it is, for noise that was drawn."""
        device = self.sampler.logits.device.type
        with torch.autocast(device, self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            dense_output, dense_features = None, []
            if self._dense:
                with torch.no_grad(), watching(self.model, self.blocks) as dense_features:
                    dense_output = self._call(batch)
            weights = self.sampler.masked(gumbel, pace.temperature, pace.noise, self._hard)
            with watching(self.model, self.blocks) as features:
                output = self._call.with_weights(weights, batch)
        if self.blocks and not features:
            raise ModelError(
                f"none of the modules whose features are compared ran: {listed(self.blocks)}; "
                f"name others with features=, or compare outputs alone with match='outputs'"
            )
        loss = self.objective(Views(output, features, dense_output, dense_features, batch, pace.guidance))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise LearningError(f"the objective gave {got}; it must give one number, as a tensor")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise LearningError("the objective does not depend on the masked weights: no gradient reaches the logits")
        return loss.reshape(())

    def blame(self, batch: Any, step: int, pace: Pace[float]) -> str | None:
        """The first layer whose output is not finite on this batch, if there is one."""
        names: list[str] = []

        def hook(name: str) -> Any:
            def look(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                    names.append(name)

            return look

        handles = [m.register_forward_hook(hook(name)) for name, m in self.model.named_modules() if name]
        try:
            with torch.no_grad():
                self(batch, step, pace)
        finally:
            for handle in handles:
                handle.remove()
        return names[0] if names else None


class Call:
    """A private copy of a model, with the user's way of running it."""

    def __init__(self, inner: nn.Module, forward: Forward | None) -> None:
        self.inner, self._forward = inner, forward
        self.custom = forward is not None
        self._own: dict[str, Tensor] = {}  # weights that others stand in for
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}  # where they belong: tied ones in several

    def __call__(self, batch: Any) -> Tensor:
        """The output with the model's own weights."""
        return self.with_weights({}, batch)

    def with_weights(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The output with these layers' weights in place of their own.

        They stay there until the next call: a model that computes activations anew in the backward pass (activation
        checkpointing) has to find them.
        """
        for name in weights.keys() - self._own.keys():
            own = self.inner.get_submodule(name).weight
            assert isinstance(own, Tensor)
            self._own[name] = own
            self._places[name] = [
                (held, key)
                for module in self.inner.modules()
                for held in (module._parameters, module._buffers)
                for key, tensor in held.items()
                if tensor is own
            ]
        for name, own in self._own.items():
            for held, key in self._places[name]:
                held[key] = weights.get(name, own)
        return run(self.inner, batch, self._forward)
