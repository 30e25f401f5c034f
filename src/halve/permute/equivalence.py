"""Check that a modified copy of a model still computes the same."""

import math
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.batches import Forward, main_output, to_device
from halve.detectors import HeadOutputs, first_run, head_outputs_in
from halve.errors import ModelError
from halve.graph import two_images
from halve.modules import clone
from halve.outputs import relative_error


class Equivalence:
    """Compares a model's outputs before and after its `copy` is modified.

    The model runs on the example and, unless it needs `forward`, on noise of the same shape: an example may be all
    zeros. Low precision would hide differences, and so would TF32 on GPUs, so the copy runs in float32 on a CPU and in
    float64 elsewhere. Detectors are compared by what their heads return.
    """

    def __init__(self, model: nn.Module, example: Any, forward: Forward | None = None) -> None:
        self._forward, self._model = forward, model
        self._inputs = [two_images(example)]
        if forward is None:
            self._inputs.append(pytree.tree_map(_noise_like, self._inputs[0]))
        self._detected: list[HeadOutputs | None] = []  # of each input, if the model is a detector
        self.copy = clone(model).eval()
        first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        exact = first.dtype == torch.float64 or first.device.type != "cpu"
        try:
            self._expected = self._first_outputs(self.copy.double() if exact else self.copy.float())
        except Exception:  # some models only run in their own precision
            self.copy = clone(model).eval()
            self._expected = self._first_outputs(self.copy)
        self._dtype = next((p.dtype for p in self.copy.parameters() if p.is_floating_point()), torch.float32)

    def check(self) -> None:
        """Raise `ModelError` if the copy, modified by the caller, gives different outputs."""
        if self._agrees(self.copy):
            return
        name = type(self._model).__name__
        if not self._agrees(clone(self._model).eval().to(self._dtype)):
            raise ModelError(
                f"{name} is not deterministic in eval mode, so moving channels cannot be verified; use permute=False"
            )
        raise ModelError(
            f"moving channels changed the outputs of {name}: part of it depends on the channel order in a way that the "
            f"captured graph does not show; use permute=False"
        )

    def _agrees(self, net: nn.Module) -> bool:
        tolerance = math.sqrt(torch.finfo(self._dtype).eps)
        return relative_error(self._outputs(net), self._expected) <= tolerance

    @torch.no_grad()
    def _first_outputs(self, net: nn.Module) -> list[Tensor]:
        found: list[Tensor] = []
        self._detected = []
        for given in self._inputs:
            result, detected = first_run(net, partial(self._run, net, given))
            self._detected.append(detected)
            found += _tensors(result) if detected is None else _tensors(detected.relative_to(detected))
        return found

    @torch.no_grad()
    def _outputs(self, net: nn.Module) -> list[Tensor]:
        found: list[Tensor] = []
        for given, detected in zip(self._inputs, self._detected, strict=True):
            run = partial(self._run, net, given)
            if detected is None:
                found += _tensors(run())
            else:
                found += _tensors(head_outputs_in(detected, net, run).relative_to(detected))
        return found

    def _run(self, net: nn.Module, given: Any) -> Any:
        batch = to_device(given, net)
        if self._forward is not None:
            return self._forward(net, batch)
        return net(*batch) if isinstance(batch, tuple) else net(batch)


def _tensors(result: Any) -> list[Tensor]:
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    tensors = tensors or [main_output(result)]  # a custom output class: an empty comparison would always pass
    return [x.detach().double().cpu() for x in tensors]


def _noise_like(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
