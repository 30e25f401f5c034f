"""Guards: which inputs a captured graph is valid for.

torch.export returns guards as Python expressions over sizes and integers. They are parsed, never executed.
"""

import ast
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halve.graph import Part, Sizes

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LONGEST = 200  # characters of a guard in a message
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "Max": max, "sym_max": max, "min": min, "sym_min": min}

Expression = Callable[[Mapping[str, Any]], Any]  # of the arguments by name


@dataclass(frozen=True)
class Guards:
    """The inputs that a captured graph is valid for.

    `sizes` has the smallest and largest size of each input dimension; `names` are the parameters of `forward`, with *
    for a variadic one; `conditions` are the guards of torch.export.

    >>> import torch
    >>> guards = Guards((((0, None), (3, 3), (0, None)),), ("x",), ("L['x'].size()[2] % 2 == 0",))
    >>> guards.broken((torch.zeros(1, 3, 8),)), guards.broken((torch.zeros(1, 3, 7),))
    (None, 'x.size()[2] % 2 == 0')
    >>> guards.broken((torch.zeros(1, 4, 8),))
    '(N, 3, any)'
    """

    sizes: Sizes
    names: tuple[str, ...]
    conditions: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parsed", tuple(_read(condition) for condition in self.conditions))

    def __reduce__(self) -> Any:
        return Guards, (self.sizes, self.names, self.conditions)

    @classmethod
    def of(cls, part: Part, forward: Callable[..., Any]) -> "Guards":
        """The guards of a captured part. `forward` is that of its module."""
        parameters = inspect.signature(forward).parameters.values()
        names = tuple(f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in parameters)
        return cls(part.sizes(), names, part.conditions)

    def without_single_images(self) -> "Guards":
        """The same guards, for batch sizes from 2."""
        sizes = tuple(((max(2, x[0][0]), x[0][1]), *x[1:]) if x and x[0][1] is None else x for x in self.sizes)
        return Guards(sizes, self.names, self.conditions)

    def broken(self, inputs: tuple[Any, ...]) -> str | None:
        """The first guard that these positional inputs violate; None if all hold."""
        given: dict[str, Any] = {}
        for index, name in enumerate(self.names[: max(len(inputs), 1)]):
            given[name.lstrip("*")] = inputs[index:] if name.startswith("*") else inputs[index]
        return self.broken_by(tuple(x for x in inputs if isinstance(x, Tensor)), given)

    def broken_by(self, tensors: tuple[Tensor, ...], arguments: Mapping[str, Any]) -> str | None:
        """Like `broken`, given the tensors among the inputs and all arguments by name."""
        for x, limits in zip(tensors, self.sizes, strict=False):
            if not _within(x, limits):
                return f"({', '.join(_shown(d, least, most) for d, (least, most) in enumerate(limits))})"
        parsed: tuple[Expression, ...] = self._parsed  # type: ignore[attr-defined]
        for condition, expression in zip(self.conditions, parsed, strict=True):
            try:
                holds = bool(expression(arguments))
            except (KeyError, TypeError, IndexError, ZeroDivisionError):
                holds = False
            if not holds:
                text = condition.replace("L['", "").replace("']", "")
                return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        return None


def _within(x: Tensor, limits: tuple[tuple[int, int | None], ...]) -> bool:
    pairs = zip(x.shape, limits, strict=False)
    return len(limits) == x.dim() and all(
        least <= size and (most is None or size <= most) for size, (least, most) in pairs
    )


def _shown(dim: int, least: int, most: int | None) -> str:
    if most is not None:
        return str(most)
    return f"{least} or more" if least else "any" if dim else "N"


def _read(condition: str) -> Expression:
    """Parse a condition. One that cannot be parsed never holds."""
    try:
        return _expression(ast.parse(condition, mode="eval").body)
    except (SyntaxError, ValueError):
        return lambda given: False


def _expression(node: ast.AST) -> Expression:
    """An expression as nested functions, which torch.compile can trace."""
    match node:
        case ast.Constant(value=int() as value):
            return lambda given: value
        case ast.Name(id="L"):
            return lambda given: given
        case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=operand):
            inner = _expression(operand)
            return (lambda given: -inner(given)) if isinstance(sign, ast.USub) else (lambda given: not inner(given))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
            apply, first, second = _ARITHMETIC[type(operation)], _expression(left), _expression(right)
            return lambda given: apply(_number(first(given)), _number(second(given)))
        case ast.Compare(left=left, ops=[operation], comparators=[right]) if type(operation) in _COMPARISONS:
            apply, first, second = _COMPARISONS[type(operation)], _expression(left), _expression(right)
            return lambda given: apply(first(given), second(given))
        case ast.Subscript(value=container, slice=ast.Constant(value=str() as key)):
            named = _expression(container)
            return lambda given: named(given)[key]
        case ast.Subscript(value=container, slice=index):
            whole, place = _expression(container), _expression(index)
            return lambda given: whole(given)[place(given)]
        case ast.Call(func=ast.Attribute(value=of, attr="size"), args=[]):
            tensor = _expression(of)
            return lambda given: _size(tensor(given))
        case ast.BoolOp(op=ast.And() | ast.Or() as joint, values=values):
            parts = [_expression(value) for value in values]
            every = isinstance(joint, ast.And)
            return lambda given: (all if every else any)(part(given) for part in parts)
        case ast.Call(
            func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="torch"), attr=name), args=arguments
        ) if name in _FUNCTIONS:
            function, among = _FUNCTIONS[name], [_expression(argument) for argument in arguments]
            return lambda given: function(*(one(given) for one in among))
    raise ValueError(f"unknown expression {ast.dump(node)[:80]}")


def _number(value: Any) -> Any:
    """An operand of arithmetic: a file may multiply texts or sizes until memory is full."""
    if isinstance(value, str | tuple | list | Mapping | Tensor):
        raise TypeError(f"arithmetic with a {type(value).__name__}")
    return value


def _size(tensor: Any) -> tuple[int, ...]:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"size of a {type(tensor).__name__}")
    return tuple(tensor.shape)
