"""What is lost when one layer alone is masked: changed predictions, KL divergence, the error of its features."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from halve.batches import Forward, result_of
from halve.masks.mask import MaskSet
from halve.modules import clone, plain_weight_, weight_of


@dataclass(frozen=True)
class LayerLoss:
    """What the mask of one layer costs if all others are dense. What the task does not have is None.

    Args:
        feature_error: Norm of the difference of the layer's outputs, relative to the norm of the dense ones; None if
            the layer did not run.
        agreement: Share of images or pixels with the dense model's class, or of boxes with a partner.
        kl: Mean KL divergence from the dense model's outputs, in nats.
        output_error: For regression, the relative difference of the model's outputs.
    """

    feature_error: float | None
    agreement: float | None = None
    kl: float | None = None
    output_error: float | None = None


class Count(Protocol):
    """What counts outputs of a task."""

    def add(self, output: Any, dense: Any, batch: Any, index: int) -> None: ...

    def shares(self) -> dict[str, Any]: ...


class LayerLosses:
    """Runs a copy of the model once for each layer and batch, with the mask of that layer alone.

    Args:
        model: The dense model. It is not changed.
        masks: Its masks.
        forward: Runs the model on an unusual batch.
    """

    def __init__(self, model: nn.Module, masks: MaskSet, forward: Forward | None) -> None:
        self._model, self._forward = clone(model).eval(), forward
        self._layers = {name: _Layer(self._model.get_submodule(name), masks, name) for name in masks}
        self._counts: dict[str, Count] = {}

    def add(
        self, against: Any, batch: Any, index: int, read: Callable[..., Any], count_of: Callable[[], Count]
    ) -> None:
        """Count a batch, given the dense model's outputs, how outputs are read, and what counts them."""
        for name, layer in self._layers.items():
            with layer.masked():
                output = read(result_of(self._model, batch, self._forward), index, f"model with only {name} masked ")
            self._counts.setdefault(name, count_of()).add(output, against, batch, index)

    def losses(self) -> dict[str, LayerLoss]:
        """The losses by layer."""
        found = {}
        for name, count in self._counts.items():
            shares = count.shares()
            known = {key: shares.get(key) for key in ("agreement", "kl", "output_error")}
            found[name] = LayerLoss(self._layers[name].feature_error, **known)
        return found


class _Layer:
    """A layer of the copy, with both weights, and the error of its outputs so far."""

    def __init__(self, module: nn.Module, masks: MaskSet, name: str) -> None:
        plain_weight_(module)
        self._module, self._dense = module, weight_of(module).clone()
        self._masked = masks[name].apply_to(self._dense)
        self._squares = self._scale = 0.0

    @property
    def feature_error(self) -> float | None:
        return math.sqrt(self._squares / self._scale) if self._scale else None

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Apply the mask, and compare each output of the layer with that of the dense weight on the same input."""
        handle = self._module.register_forward_hook(self._compare, with_kwargs=True)
        self._use(self._masked)
        try:
            yield
        finally:
            self._use(self._dense)
            handle.remove()

    def _compare(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self._use(self._dense)
        dense = module.forward(*args, **kwargs)
        self._use(self._masked)
        self._squares += float((output.double() - dense.double()).square().sum())
        self._scale += float(dense.double().square().sum())

    def _use(self, weight: Tensor) -> None:
        assert isinstance(self._module.weight, Tensor)
        self._module.weight.data = weight
