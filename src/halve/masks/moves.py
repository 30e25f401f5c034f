"""Moves: reordering the channels of a whole network so that its function stays the same.

For each parameter and buffer that takes part, by state-dict name, the new order along each dimension: place i of the
moved tensor holds what was at order[i]. Found by `halve.prune(permute=True)`; `halve.apply(permute=True)` makes them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from halve.errors import MaskError

Moves = Mapping[str, Mapping[int, tuple[int, ...]]]


def checked(moves: Moves) -> dict[str, dict[int, tuple[int, ...]]]:
    """A copy of the moves; raises where an order is no permutation."""
    good: set[int] = set()  # orders are shared by many tensors
    for name, dims in moves.items():
        for dim, order in dims.items():
            if dim < 0:
                raise MaskError(f"the dimensions of {name} are counted from the front, not {dim}")
            if id(order) not in good and sorted(order) != list(range(len(order))):
                raise MaskError(f"the order of {name} along dimension {dim} is no permutation")
            good.add(id(order))
    return {name: dict(dims) for name, dims in moves.items()}


def moved(tensor: Tensor, dims: Mapping[int, tuple[int, ...]]) -> Tensor:
    """The tensor with its channels in the new order.

    >>> moved(torch.tensor([[1, 2, 3], [4, 5, 6]]), {0: (1, 0), 1: (2, 0, 1)}).tolist()
    [[6, 4, 5], [3, 1, 2]]
    """
    for dim, order in dims.items():
        tensor = tensor.index_select(dim, torch.tensor(order, device=tensor.device))
    return tensor


def moved_back(tensor: Tensor, dims: Mapping[int, tuple[int, ...]]) -> Tensor:
    """The inverse of `moved`."""
    inverse = {dim: tuple(torch.tensor(order).argsort().tolist()) for dim, order in dims.items()}
    return moved(tensor, inverse)


def move_(copy: nn.Module, moves: Moves) -> None:
    """Reorder the channels of a copy of the model. Raises `MaskError` where the moves are for another model."""
    named = [*copy.named_parameters(remove_duplicate=False), *copy.named_buffers(remove_duplicate=False)]
    tensors = dict(named)
    for name, dims in moves.items():
        tensor = tensors.get(name)
        if tensor is None or not fits(tensor, dims):
            got = "has no such tensor" if tensor is None else f"has the shape {tuple(tensor.shape)}"
            raise MaskError(f"the masks' channel orders are for another model: {name} {got} here")
    with torch.no_grad():
        for name, dims in moves.items():
            tensors[name].copy_(moved(tensors[name], dims))


def fits(tensor: Tensor, dims: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether the tensor has these dimensions."""
    return all(dim < tensor.dim() and tensor.shape[dim] == len(order) for dim, order in dims.items())
