"""BatchNorm statistics that move while masks are learned, as they do in training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class MovingStatistics:
    """The running statistics of the masked network, beside those of the dense one.

    Args:
        model: The frozen model.
        start: Statistics to start from, by state-dict name; those of the model by default.
        moving: Whether statistics move at all.
    """

    def __init__(self, model: nn.Module, start: Mapping[str, Tensor], *, moving: bool) -> None:
        self._norms = [
            (name, module)
            for name, module in model.named_modules()
            if moving and isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        buffers = dict(model.named_buffers())
        names = [f"{name}.{key}".lstrip(".") for name, _ in self._norms for key in ("running_mean", "running_var")]
        self.tensors = {name: start.get(name, buffers[name]).to(buffers[name], copy=True) for name in names}

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Normalise by the statistics of each batch, and average them."""
        self._train(True)
        try:
            yield
        finally:
            self._train(False)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the statistics afterwards."""
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        try:
            yield
        finally:
            self.restore_(before)

    @torch.no_grad()
    def restore_(self, statistics: Mapping[str, Tensor]) -> None:
        """Copy statistics into place."""
        for name, tensor in statistics.items():
            self.tensors[name].copy_(tensor)

    def _train(self, mode: bool) -> None:
        for _, norm in self._norms:
            norm.training = mode
