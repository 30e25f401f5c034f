"""Does a changed copy of a model still compute the same? Run both and compare."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.batches import Forward, main_output, to_device
from halve.errors import ModelError
from halve.graph import two_images
from halve.modules import clone


class Sameness:
    """What a model gives on an example, and where possible on noise of the same shape: an example may be all zeros.

    Half precision would hide differences, and so would the short mantissas that GPUs multiply single precision with:
    the copies run in single precision on a CPU, in double precision elsewhere.
    """

    def __init__(self, model: nn.Module, example: Any, forward: Forward | None = None) -> None:
        self._forward, self._model = forward, model
        self._inputs = [two_images(example)]
        if forward is None:
            self._inputs.append(pytree.tree_map(_noise_like, self._inputs[0]))
        self.copy = clone(model).eval()
        first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        exact = first.dtype == torch.float64 or first.device.type != "cpu"
        try:
            self._expected = self._outputs(self.copy.double() if exact else self.copy.float())
        except Exception:  # a model may insist on its own precision
            self.copy = clone(model).eval()
            self._expected = self._outputs(self.copy)

    def check(self) -> None:
        """Raise where `copy`, which the caller has changed, gives other outputs than before."""
        dtype = next((p.dtype for p in self.copy.parameters() if p.is_floating_point()), torch.float32)
        if not _close(self._expected, self._outputs(self.copy), torch.finfo(dtype).eps ** 0.5):
            if not self._repeats(dtype):
                raise ModelError(
                    f"{type(self._model).__name__} gives other outputs when it is run again on the same images in eval "
                    f"mode: whether channels may move cannot be checked; learn or prune without permute"
                )
            raise ModelError(
                f"moving channels changed the outputs of {type(self._model).__name__}: part of it reads channels in a "
                f"way that the captured graph does not show; learn or prune without permute"
            )

    def _repeats(self, dtype: torch.dtype) -> bool:
        again = clone(self._model).eval().to(dtype)
        return _close(self._expected, self._outputs(again), torch.finfo(dtype).eps ** 0.5)

    @torch.no_grad()
    def _outputs(self, net: nn.Module) -> list[Tensor]:
        found: list[Tensor] = []
        for given in self._inputs:
            batch = to_device(given, net)
            if self._forward is not None:
                result = self._forward(net, batch)
            else:
                result = net(*batch) if isinstance(batch, tuple) else net(batch)
            tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            tensors = tensors or [
                main_output(result)
            ]  # an object of the model's own: nothing to compare is not the same
            found += [x.detach().double().cpu() for x in tensors]
        return found


def _noise_like(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)


def _close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> bool:
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return False
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    for a, b in pairs:
        scale = float(a.nan_to_num(0, 0, 0).abs().max())
        if not torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True):
            return False
    return True
