"""The learner: a module that owns the logits and runs the frozen model with sampled weights. DDP wraps it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Forward, images_of, main_output, result_of, to_device
from halve.detectors import HeadOutputs, first_run, head_outputs, head_outputs_in
from halve.errors import LearningError, ModelError, listed
from halve.learn.augment import augmented
from halve.learn.moving import MovingStatistics
from halve.learn.norms import Norms
from halve.learn.objective import DISTILLATIONS, Objective, Views, watching
from halve.learn.sampling import Final, Sampler, generator_of
from halve.learn.schedule import StepValues
from halve.masks.corrections import corrected
from halve.masks.mask import MaskSet
from halve.modules import weight_name


class Learner(nn.Module):
    """Computes the loss of one sampled mask on one batch.

    The frozen model is not a submodule, so the logits are the only parameter: nothing is registered on the model, and
    DDP has a single tensor to average. Norms that are learned are numbers after the logits.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        objective: Objective,
        blocks: list[str],
        *,
        norms: Norms | None = None,
        statistics: MovingStatistics | None = None,
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
        self._norms = Norms(model, {}, learned=False) if norms is None else norms
        self.statistics = MovingStatistics(model, {}, moving=False) if statistics is None else statistics
        if self._norms.size:
            sampler.extend_(self._norms.size)
        self._runner = Runner(model, forward)
        self._dense, self._hard = dense, hard
        self._seed, self._rank, self._autocast, self._augment = seed, rank, autocast, augment

    @property
    def model(self) -> nn.Module:
        """The frozen model."""
        return self._runner.inner

    @property
    def repeatable(self) -> bool:
        """Whether every step does the same work, as it does with built-in objectives and without `forward`."""
        return self.objective in DISTILLATIONS and not self._runner.custom

    def forward(self, batch: Any, step: int, values: StepValues[float], micro: int = 0) -> Tensor:
        """The loss of a batch; `micro` counts the batches of one step when gradients are accumulated."""
        return self.loss(self.augmented(batch, step, micro), self.draw(step, micro), values)

    def draw(self, step: int, micro: int = 0) -> list[Tensor]:
        """The Gumbel noise of one step."""
        return self.sampler.draw(self._seed, step, self._rank + 1000 * micro)

    def augmented(self, batch: Any, step: int, micro: int = 0) -> Any:
        """The batch, with its images augmented if that is enabled and they are stacked and large enough."""
        if not self._augment:
            return batch
        images = to_device(images_of(batch), self.model)
        if not isinstance(images, Tensor) or images.dim() != 4 or min(images.shape[2:]) < 8:
            return images
        generator = generator_of(images.device, self._seed + 1, step, self._rank + 1000 * micro)
        return augmented(images, generator)

    def loss(self, batch: Any, gumbel: list[Tensor], values: StepValues[Any]) -> Tensor:
        """The loss of a batch for given noise, without augmentation."""
        device = self.sampler.logits.device.type
        with torch.autocast(device, self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            dense_output, dense_features = None, []
            if self._dense:
                with torch.no_grad(), watching(self.model, self.blocks) as dense_features:
                    dense_output = self._runner(batch)
            weights = self.sampler.masked(gumbel, values.temperature, values.noise, self._hard)
            tensors = _by_tensor(weights) | self._norms.tensors(self.sampler.rest) | self.statistics.tensors
            with self.statistics.moving(), watching(self.model, self.blocks) as features:
                output = self._runner.with_tensors(tensors, batch)
        if self.blocks and not features:
            raise ModelError(
                f"no module whose features are matched ran: {listed(self.blocks)}; "
                f"name others with features=, or match outputs only with match='outputs'"
            )
        loss = self.objective(Views(output, features, dense_output, dense_features, batch, values.guidance))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise LearningError(f"the objective must return a tensor with one element, got {got}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise LearningError("the objective does not depend on the masked weights: no gradient reaches the logits")
        return loss.reshape(())

    def masks(self, final: Final = "argmax", seed: int = 0) -> MaskSet:
        """The masks learned so far, with the corrections and statistics of norms that belong to them."""
        corrections = self._norms.corrections(self.sampler.rest)
        return MaskSet(self.sampler.masks(final, seed), self.statistics.tensors, corrections=corrections)

    @torch.no_grad()
    def output(self, batch: Any, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """The output of the dense network, or with the given tensors; in the network's own precision."""
        return self._runner.with_tensors(tensors or {}, batch)

    def tensors(self, masks: MaskSet) -> dict[str, Tensor]:
        """What masks put in place of the dense network's tensors, by state-dict name."""
        own = self._runner.own
        weights = {name: mask.apply_to(own(weight_name(name))) for name, mask in masks.items()}
        statistics = {name: value.to(own(name)) for name, value in masks.statistics.items()}
        corrections = masks.corrections.items()
        return _by_tensor(weights) | statistics | {name: corrected(own(name), pair) for name, pair in corrections}

    def blame(self, batch: Any, step: int, values: StepValues[float]) -> str | None:
        """The first layer whose output is not finite on this batch, or None."""
        names: list[str] = []

        def hook(name: str) -> Any:
            def look(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                    names.append(name)

            return look

        handles = [m.register_forward_hook(hook(name)) for name, m in self.model.named_modules() if name]
        try:
            with torch.no_grad(), self.statistics.restored():
                self(batch, step, values)
        finally:
            for handle in handles:
                handle.remove()
        return names[0] if names else None


def _by_tensor(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by state-dict name, given those by layer name."""
    return {weight_name(name): weight for name, weight in weights.items()}


class Runner:
    """Runs a private copy of a model, with some of its tensors replaced."""

    def __init__(self, inner: nn.Module, forward: Forward | None) -> None:
        self.inner, self._forward = inner, forward
        self.custom = forward is not None
        self._own: dict[str, Tensor] = {}  # originals of tensors that were ever replaced
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}  # where they are held; tied ones in several
        self._heads: set[str] | None = None  # of a detector, empty for other models; unknown before the first run
        self._dense: tuple[Any, HeadOutputs] | None = None  # the last batch, and what a dense detector's heads return

    def __call__(self, batch: Any) -> Tensor:
        """The output with the model's own tensors."""
        return self.with_tensors({}, batch)

    def with_tensors(self, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The output with the given tensors, by state-dict name. That of a detector is what its heads return.

        They stay in place until the next call, since activation checkpointing runs the model again in the backward
        pass.
        """
        for name in tensors.keys() - self._own.keys():
            self._own[name] = own = self.own(name)
            self._places[name] = [
                (held, key)
                for module in self.inner.modules()
                for held in (module._parameters, module._buffers)
                for key, tensor in held.items()
                if tensor is own
            ]
        run = partial(self._result, tensors, batch)
        if self._heads is None:  # the first run tells whether the model is a detector
            result, found = first_run(self.inner, run)
            self._heads = set() if found is None else found.heads
            if found is None:
                return main_output(result)
            if not tensors:
                return self._noted(batch, found).relative_to(found)
        if not self._heads:
            return main_output(run())
        if not tensors:
            found = self._noted(batch, head_outputs(self.inner, run, self._heads))
            return found.relative_to(found)
        if self._dense is None or self._dense[0] is not batch:
            with torch.no_grad():
                self._noted(batch, head_outputs(self.inner, partial(self._result, {}, batch), self._heads))
        assert self._dense is not None
        return head_outputs_in(self._dense[1], self.inner, run).relative_to(self._dense[1])

    def _noted(self, batch: Any, found: HeadOutputs) -> HeadOutputs:
        self._dense = batch, found
        return found

    def _result(self, tensors: Mapping[str, Tensor], batch: Any) -> Any:
        for name, own in self._own.items():
            for held, key in self._places[name]:
                held[key] = tensors.get(name, own)
        return result_of(self.inner, batch, self._forward)

    def own(self, name: str) -> Tensor:
        """The original of a tensor, by its state-dict name."""
        path, _, attribute = name.rpartition(".")
        own = self._own.get(name, getattr(self.inner.get_submodule(path), attribute))
        assert isinstance(own, Tensor)
        return own
