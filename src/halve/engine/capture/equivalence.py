"""Does a graph compute what its model computes? Run both and compare.

torch.export captures under the condition that no size is 1, mostly for its own sake, and sometimes because the model's
code treats a single image differently. The graph does not tell which; running both does.
"""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.engine.capture.guards import Guards
from halve.outputs import relative_error

_TOLERANCE = 1e-2  # fused sums are rounded differently, on tensor cores coarsely


def checked(graph: nn.Module, model: nn.Module, guards: Guards, inputs: tuple[Tensor, ...]) -> Guards | str:
    """The guards that the graph really needs, or why it cannot replace the model on these inputs.

    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x if x.shape[0] == 1 else x
    >>> free = Guards((((0, None), (3, 3)),), ("x",), ())
    >>> checked(nn.Identity(), Net(), free, (torch.ones(4, 3),)).sizes
    (((2, None), (3, 3)),)
    """
    if (broken := guards.broken(inputs)) is not None:
        return f"the graph of two images is only valid for inputs with {broken}"
    if not agree(graph, model, tuple(_first(x, 2) for x in inputs), {}):
        return "the captured graph does not compute what the model computes"
    single = tuple(_first(x, 1) for x in inputs)
    if guards.broken(single) is None and not agree(graph, model, single, {}):
        guards = guards.several_images()
    if guards.broken(inputs) is not None:
        return "its code treats one image differently from several"
    return guards


def agree(graph: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether both return the same; False if the model does not run. A random model is compared by shapes."""
    try:
        expected, got = _outputs(model, args, kwargs), _outputs(graph, args, kwargs)
        if relative_error(got, expected) <= _TOLERANCE:
            return True
        again = _outputs(model, args, kwargs)
    except Exception:  # the model's own code, on inputs that it may not be made for
        return False
    return relative_error(again, expected) > _TOLERANCE and _shapes(got) == _shapes(expected)


def _outputs(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # which a network may write to
    return net(*args, **kwargs)


def _shapes(result: Any) -> Any:
    leaves, structure = pytree.tree_flatten(result)
    return structure, [x.shape if isinstance(x, Tensor) else x for x in leaves]


def _first(x: Tensor, count: int) -> Tensor:
    return x[:count] if len(x) >= count else torch.cat([x, x])
