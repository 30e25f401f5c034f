"""Does a graph give what its model gives? Tried by running both, where torch.export sets sizes apart.

It captures a graph under the condition that no size is 1, neither of an input nor of anything on the way: mostly for
its own sake, and sometimes since the model's code asks for it. Which of the two it was cannot be seen from the graph.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.engine.capture.guards import Guards, set_apart
from halve.graph import Sizes

_TOLERANCE = 1e-2  # of the largest output: fused sums are rounded otherwise, by the tensor cores coarsely


def tried(
    graph: nn.Module, model: nn.Module, sizes: Sizes, guards: Guards, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sizes, Guards]:
    """Sizes and conditions that a graph, captured with these arguments, really holds for: 1 is among them or it is not.

    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x if x.shape[0] == 1 else x
    >>> net, free = Net(), ((0, None), (3, 3))
    >>> tried(nn.Identity(), net, (free,), Guards(("x",), ()), (torch.ones(2, 3),), {})[0]
    (((2, None), (3, 3)),)
    """

    def cut(dims: tuple[int, ...], size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        limits = iter(sizes)
        positional, named = pytree.tree_map_only(
            Tensor, lambda x: _cut(x, next(limits, ()), dims, size), (args, kwargs)
        )
        return positional, named

    def agreed(dims: tuple[int, ...], size: int) -> bool:
        return agree(graph, model, *cut(dims, size))

    for dims in ((0,), (2, 3)):
        if _may_be_one(sizes, dims) and not agreed(dims, 1):
            sizes = tuple(tuple(_from_two(limits, d in dims) for d, limits in enumerate(x)) for x in sizes)
    apart = {condition: value for condition in guards.conditions if (value := set_apart(condition)) is not None}
    needless: set[str] = set()
    ones = _where_one(apart, lambda size: _given(model, *cut((2, 3), size)), _smallest(args, kwargs))
    for size, found in ones.items():
        if all(agree(graph, model, *shape) for shape in (cut((2, 3), size), cut((2,), size), cut((3,), size))):
            needless |= found
    return sizes, guards.without(needless)


def _may_be_one(sizes: Sizes, dims: tuple[int, ...]) -> bool:
    return any(most is None and least < 2 for x in sizes for d, (least, most) in enumerate(x) if d in dims)


def _from_two(limits: tuple[int, int | None], meant: bool) -> tuple[int, int | None]:
    least, most = limits
    return (max(least, 2), most) if meant and most is None else limits


def agree(graph: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether both give the same; not where the model does not run. Of a model that is random shapes are compared."""
    try:
        wanted, got = _outputs(model, args, kwargs), _outputs(graph, args, kwargs)
        if _close(wanted, got):
            return True
        again = _outputs(model, args, kwargs)
    except Exception:  # the model's own code: what does not run on such inputs is not asked to
        return False
    return not _close(wanted, again) and _of_one_shape(wanted, got)


def _outputs(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
    return pytree.tree_flatten(net(*args, **kwargs))


def _of_one_shape(wanted: tuple[list[Any], Any], got: tuple[list[Any], Any]) -> bool:
    shapes = [[x.shape if isinstance(x, Tensor) else x for x in leaves] for leaves, _ in (wanted, got)]
    return bool(wanted[1] == got[1] and shapes[0] == shapes[1])


def _close(wanted: tuple[list[Any], Any], got: tuple[list[Any], Any]) -> bool:
    if not _of_one_shape(wanted, got):
        return False
    for a, b in zip(wanted[0], got[0], strict=True):
        if isinstance(a, Tensor) and a.numel():
            scale = float(a.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
            if not torch.allclose(a.double(), b.double(), rtol=0, atol=_TOLERANCE * scale, equal_nan=True):
                return False
    return True


def _where_one(
    apart: dict[str, Callable[[Any], Any]], given: Callable[[int], Any], largest: int
) -> dict[int, set[str]]:
    """For each condition the largest size of a square image for which something is 1 that it sets apart."""
    found: dict[int, set[str]] = {}
    left = dict(apart)
    for size in range(largest, 0, -1) if left else ():
        arguments = given(size)
        ones = {condition for condition, value in left.items() if _is_one(value, arguments)}
        if ones:
            found[size] = ones
            left = {condition: value for condition, value in left.items() if condition not in ones}
    return found


def _is_one(value: Callable[[Any], Any], given: Any) -> bool:
    try:
        return bool(value(given) == 1)
    except (KeyError, TypeError, IndexError, ZeroDivisionError):
        return False


def _given(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments


def _smallest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The least height or width of all images."""
    images = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() == 4]
    return min((min(x.shape[2:]) for x in images), default=0)


def _cut(x: Tensor, limits: Any, dims: tuple[int, ...], size: int) -> Tensor:
    """No larger than `size` in those dimensions that are free."""
    for dim, (_, most) in enumerate(limits):
        if dim in dims and most is None and (dim == 0 or x.dim() == 4):
            x = x.narrow(dim, 0, min(size, x.shape[dim]))
    return x
