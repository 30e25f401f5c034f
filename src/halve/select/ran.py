"""Find out which layers run: a network may stop early, or have heads that only training uses."""

from collections.abc import Collection
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halve.batches import Forward, iterate, result_of
from halve.modules import clone


def layers_that_run(model: nn.Module, layers: Collection[str], data: Any, forward: Forward | None = None) -> set[str]:
    """The layers whose weights are read when the model runs on the data. Stops reading data when all of them did.

    Weights are watched, not calls of modules: attention reads its last layer's weight without calling the layer.

    Args:
        model: The model. It is not changed.
        layers: Names of the layers in question.
        data: Batches of images.
        forward: `forward(model, batch)` runs the model on an unusual batch.

    >>> class Stopping(nn.Sequential):
    ...     def forward(self, x):
    ...         return self[0](x)
    >>> layers_that_run(Stopping(nn.Linear(8, 4), nn.Linear(4, 2)), ["0", "1"], torch.zeros(2, 8))
    {'0'}
    """
    copy = clone(model).eval()
    reads = _Reads({name: _weights(copy.get_submodule(name)) for name in layers})
    with torch.no_grad():
        for batch in iterate(data):
            try:
                with reads:
                    result_of(copy, batch, forward)
            except torch.OutOfMemoryError:  # whoever runs the model next says what to do about it
                return set(layers)
            if not reads.unread:
                break
    return set(layers) - reads.unread


def _weights(layer: nn.Module) -> list[Tensor]:
    """What the layer's weight is stored in, or computed from."""
    stored = (*layer.named_parameters(), *layer.named_buffers())
    return [tensor for name, tensor in stored if name.rpartition(".")[2] != "bias"]


class _Reads(TorchDispatchMode):
    """Watches which layers' weights operations read."""

    def __init__(self, weights: dict[str, list[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unread = set(weights)
        self._readers: dict[int, set[str]] = {}
        for name, tensors in weights.items():
            for tensor in tensors:
                self._readers.setdefault(id(tensor), set()).add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            self.unread -= self._readers.get(id(value), set())
        return func(*args, **(kwargs or {}))
