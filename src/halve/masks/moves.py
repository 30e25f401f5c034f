"""Moves: reorder the channels of a network without changing its function.

Moves map the state-dict name of each affected parameter and buffer to the new order along each of its dimensions:
element i of the moved tensor is element order[i] of the original. `halve.learn` and `halve.prune(permute=True)`
find them, `halve.apply` performs them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from halve.errors import MaskError

Moves = Mapping[str, Mapping[int, tuple[int, ...]]]


def checked(moves: Moves) -> dict[str, dict[int, tuple[int, ...]]]:
    """A copy of the moves. Raises if an order is not a permutation."""
    good: set[int] = set()  # many tensors share one order
    for name, dims in moves.items():
        for dim, order in dims.items():
            if dim < 0:
                raise MaskError(f"the dimensions that {name} moves along must not be negative, got {dim}")
            if id(order) not in good and sorted(order) != list(range(len(order))):
                raise MaskError(f"the order of {name} along dimension {dim} is not a permutation")
            good.add(id(order))
    return {name: dict(dims) for name, dims in moves.items()}


def moved(tensor: Tensor, dims: Mapping[int, tuple[int, ...]]) -> Tensor:
    """The tensor with its channels reordered.

    >>> moved(torch.tensor([[1, 2, 3], [4, 5, 6]]), {0: (1, 0), 1: (2, 0, 1)}).tolist()
    [[6, 4, 5], [3, 1, 2]]
    """
    for dim, order in dims.items():
        tensor = tensor.index_select(dim, torch.tensor(order, device=tensor.device))
    return tensor


def moved_back(tensor: Tensor, dims: Mapping[int, tuple[int, ...]]) -> Tensor:
    """The inverse of `moved`."""
    return moved(tensor, _inverse(dims))


def inverse_of(moves: Moves) -> Moves:
    """The moves that undo these."""
    return {name: _inverse(dims) for name, dims in moves.items()}


def _inverse(dims: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    return {dim: tuple(torch.tensor(order).argsort().tolist()) for dim, order in dims.items()}


def move_(copy: nn.Module, moves: Moves) -> None:
    """Reorder the channels of a model in place. Raises `MaskError` if the moves are for another model."""
    tensors = check_moves(copy, moves)
    with torch.no_grad():
        for name, dims in moves.items():
            tensors[name].copy_(moved(tensors[name], dims))


def check_moves(model: nn.Module, moves: Moves) -> dict[str, Tensor]:
    """Return the model's tensors by name. Raises `MaskError` if the moves are for another model."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = dict(named)
    for name, dims in moves.items():
        tensor = tensors.get(name)
        if tensor is None or not fits(tensor, dims):
            got = "does not exist" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise MaskError(f"the masks' channel orders are for another model: {name} {got} in this one")
    return tensors


def fits(tensor: Tensor, dims: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether the orders match the tensor's dimensions."""
    return all(dim < tensor.dim() and tensor.shape[dim] == len(order) for dim, order in dims.items())
