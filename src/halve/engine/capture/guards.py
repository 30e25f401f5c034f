"""Which sizes of its inputs a captured graph holds for: conditions that torch.export noted as text, kept as text.

They are looked at as expressions of sizes and whole numbers and never run as code.
"""

import ast
import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TOLD_AS = "_guards_code"  # an attribute of exported programs
_LONGEST = 200  # of a condition, when it is shown
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "Max": max, "sym_max": max, "min": min, "sym_min": min}


Reading = Callable[[Mapping[str, Any]], Any]  # of arguments by name


@dataclass(frozen=True)
class Guards:
    """`names` are the parameters that inputs are passed for; one that begins with * takes all that are left.

    >>> import torch
    >>> guards = Guards(("x",), ("L['x'].size()[2] % 2 == 0",))
    >>> guards.broken((torch.zeros(1, 3, 8, 8),)), guards.broken((torch.zeros(1, 3, 7, 8),))
    (None, 'x.size()[2] % 2 == 0')
    """

    names: tuple[str, ...]
    conditions: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_readings", tuple(_read(condition) for condition in self.conditions))

    def __reduce__(self) -> Any:
        return Guards, (self.names, self.conditions)

    @classmethod
    def of(cls, program: ExportedProgram, forward: Callable[..., Any]) -> "Guards":
        """What an exported program, whose `forward` that was, holds for."""
        parameters = inspect.signature(forward).parameters.values()
        names = tuple(f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in parameters)
        return cls(names, tuple(getattr(program, _TOLD_AS, ())))

    @staticmethod
    def told(program: ExportedProgram) -> bool:
        """Whether this version of torch.export says what its programs hold for."""
        return hasattr(program, _TOLD_AS)

    def broken(self, inputs: tuple[Any, ...]) -> str | None:
        """The first condition that these inputs do not meet, or that cannot be understood; None where all hold."""
        given: dict[str, Any] = {}
        for index, name in enumerate(self.names[: max(len(inputs), 1)]):
            given[name.lstrip("*")] = inputs[index:] if name.startswith("*") else inputs[index]
        return self.unmet(given)

    def unmet(self, given: Mapping[str, Any]) -> str | None:
        """As `broken`, of arguments by name."""
        readings: tuple[Reading, ...] = self._readings  # type: ignore[attr-defined]
        for condition, reading in zip(self.conditions, readings, strict=True):
            try:
                holds = bool(reading(given))
            except (KeyError, TypeError, IndexError, ZeroDivisionError):
                holds = False
            if not holds:
                text = condition.replace("L['", "").replace("']", "")
                return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        return None

    def without(self, conditions: Collection[str]) -> "Guards":
        return Guards(self.names, tuple(condition for condition in self.conditions if condition not in conditions))


def set_apart(condition: str) -> Reading | None:
    """What a condition says is not 1; None where it says something else, or speaks of remainders, which come and go.

    >>> import torch
    >>> set_apart("L['x'].size()[0] // 2 != 1")({"x": torch.zeros(6)})
    3
    """
    try:
        body = ast.parse(condition, mode="eval").body
        match body:
            case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[ast.Constant(value=1)]):
                return None if any(isinstance(node, ast.Mod) for node in ast.walk(left)) else _reading(left)
    except (SyntaxError, ValueError):  # not understood
        return None
    return None


def misfit(x: Tensor, limits: tuple[tuple[int, int | None], ...]) -> str | None:
    """Why a graph that holds for sizes from, to (None: no end) does not hold for a tensor; None where it does.

    >>> import torch
    >>> misfit(torch.zeros(2, 3), ((0, None), (3, 3))), misfit(torch.zeros(2, 4), ((0, None), (3, 3)))
    (None, 'shape (2, 4) where the network was captured for (any, 3)')
    """
    pairs = zip(x.shape, limits, strict=False)
    if len(limits) == x.dim() and all(
        least <= size and (most is None or size <= most) for size, (least, most) in pairs
    ):
        return None
    wanted = ", ".join(
        str(most) if most is not None else f"{least} or more" if least else "any" for least, most in limits
    )
    return f"shape {tuple(x.shape)} where the network was captured for ({wanted})"


def _read(condition: str) -> Reading:
    """A condition that cannot be understood holds for nothing."""
    try:
        return _reading(ast.parse(condition, mode="eval").body)
    except (SyntaxError, ValueError):
        return lambda given: False


def _reading(node: ast.AST) -> Reading:
    """An expression as functions in functions, which torch.compile can follow as well."""
    match node:
        case ast.Constant(value=int() | str() as value):
            return lambda given: value
        case ast.Name(id="L"):
            return lambda given: given
        case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=operand):
            inner = _reading(operand)
            return (lambda given: -inner(given)) if isinstance(sign, ast.USub) else (lambda given: not inner(given))
        case (
            ast.BinOp(left=left, op=operation, right=right)
            | ast.Compare(left=left, ops=[operation], comparators=[right])
        ) if type(operation) in _OPERATIONS:
            apply, first, second = _OPERATIONS[type(operation)], _reading(left), _reading(right)
            return lambda given: apply(first(given), second(given))
        case ast.Subscript(value=container, slice=index):
            whole, place = _reading(container), _reading(index)
            return lambda given: whole(given)[place(given)]
        case ast.Call(func=ast.Attribute(value=of, attr="size"), args=[]):
            tensor = _reading(of)
            return lambda given: _size(tensor(given))
        case ast.BoolOp(op=ast.And() | ast.Or() as joint, values=values):
            parts = [_reading(value) for value in values]
            every = isinstance(joint, ast.And)
            return lambda given: (all if every else any)(part(given) for part in parts)
        case ast.Call(
            func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="torch"), attr=name), args=arguments
        ) if name in _FUNCTIONS:
            function, among = _FUNCTIONS[name], [_reading(argument) for argument in arguments]
            return lambda given: function(*(one(given) for one in among))
    raise ValueError(f"unknown expression {ast.dump(node)[:80]}")


def _size(tensor: Any) -> tuple[int, ...]:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"size of a {type(tensor).__name__}")
    return tuple(tensor.shape)
