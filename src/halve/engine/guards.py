"""Which sizes of its inputs a captured graph holds for: conditions that torch.export noted as text, kept as text.

They are looked at as expressions of sizes and whole numbers and never run as code.
"""

import ast
import inspect
import operator
from collections.abc import Callable, Mapping
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
_LONGEST = 200  # of a condition, when it is shown
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "Max": max, "sym_max": max, "min": min, "sym_min": min}


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

    @classmethod
    def of(cls, program: ExportedProgram, forward: Callable[..., Any]) -> "Guards":
        """What an exported program, whose `forward` that was, holds for."""
        parameters = inspect.signature(forward).parameters.values()
        names = tuple(f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in parameters)
        return cls(names, tuple(getattr(program, "_guards_code", ())))

    def broken(self, inputs: tuple[Any, ...]) -> str | None:
        """The first condition that these inputs do not meet, or that cannot be understood; None where all hold."""
        given: dict[str, Any] = {}
        for index, name in enumerate(self.names[: max(len(inputs), 1)]):
            given[name.lstrip("*")] = inputs[index:] if name.startswith("*") else inputs[index]
        return self.unmet(given)

    def unmet(self, given: Mapping[str, Any]) -> str | None:
        """As `broken`, of arguments by name."""
        for condition in self.conditions:
            try:
                parsed = ast.parse(condition, mode="eval").body
                holds = _sets_one_apart(parsed) or _value(parsed, given)
            except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, SyntaxError):
                holds = False
            if not holds:
                text = condition.replace("L['", "").replace("']", "")
                return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
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


def _sets_one_apart(node: ast.AST) -> bool:
    """Whether a condition is that a size is not 1: torch.export asks for it, the operations of the graph do not."""
    match node:
        case ast.Compare(ops=[ast.NotEq()], comparators=[ast.Constant(value=1)]):
            return True
    return False


def _value(node: ast.AST, given: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, given)
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATIONS[type(operation)](_value(left, given), _value(right, given))
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            return _OPERATIONS[type(operation)](_value(left, given), _value(right, given))
        case ast.Name(id="L"):
            return given
        case ast.Subscript(value=value, slice=index):
            return _value(value, given)[_value(index, given)]
        case ast.Call(func=ast.Attribute(value=value, attr="size"), args=[]):
            tensor = _value(value, given)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"size of a {type(tensor).__name__}")
            return tuple(tensor.shape)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, given)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(value, given) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_value(value, given) for value in values)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="torch"), attr=name), args=arguments):
            return _FUNCTIONS[name](*(_value(argument, given) for argument in arguments))
    raise ValueError(f"unknown expression {ast.dump(node)[:80]}")
