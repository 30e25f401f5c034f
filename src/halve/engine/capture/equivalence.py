"""Check that a captured graph is equivalent to its model, by running both.

torch.export excludes batch size 1 from graphs with a dynamic batch size, whether or not the model treats a single image
differently. Running both tells which.
"""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.engine.capture.guards import Guards
from halve.outputs import relative_error

_TOLERANCE = 1e-2  # fused sums round differently, and tensor cores may use TF32


def checked(graph: nn.Module, model: nn.Module, guards: Guards, inputs: tuple[Tensor, ...]) -> Guards | str:
    """The guards under which the graph may replace the model, or the reason why it may not.

    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x if x.shape[0] == 1 else x
    >>> free = Guards((((0, None), (3, 3)),), ("x",), ())
    >>> checked(nn.Identity(), Net(), free, (torch.ones(4, 3),)).sizes
    (((2, None), (3, 3)),)
    """
    if (broken := guards.broken(inputs)) is not None:
        return f"a graph captured with two images is only valid for inputs with {broken}"
    if not agree(graph, model, tuple(_first(x, 2) for x in inputs), {}):
        return "the captured graph does not compute what the model computes"
    single = tuple(_first(x, 1) for x in inputs)
    if guards.broken(single) is None and not agree(graph, model, single, {}):
        guards = guards.without_single_images()
    if guards.broken(inputs) is not None:
        return "its code treats single images differently"
    return guards


def agree(graph: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether both return the same outputs; for random models, the same shapes. False if the model does not run."""
    try:
        expected, got = _outputs(model, args, kwargs), _outputs(graph, args, kwargs)
        if relative_error(got, expected) <= _TOLERANCE:
            return True
        again = _outputs(model, args, kwargs)
    except Exception:  # the model's own code, on inputs that it may not support
        return False
    return relative_error(again, expected) > _TOLERANCE and _shapes(got) == _shapes(expected)


def _outputs(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # networks may write to their inputs
    return net(*args, **kwargs)


def _shapes(result: Any) -> Any:
    leaves, structure = pytree.tree_flatten(result)
    return structure, [x.shape if isinstance(x, Tensor) else x for x in leaves]


def _first(x: Tensor, count: int) -> Tensor:
    return x[:count] if len(x) >= count else torch.cat([x, x])
