"""Which values of a graph share their memory, and which operations write to it."""

import operator
from typing import Any

import torch
from torch.fx import Node

_UNSAID = (torch.ops.aten.type_as.default,)  # may give back what it got, and its schema does not say so


def origin(node: Node) -> Node:
    """The value whose memory this one may lie in: what a chain of views and in-place operations began with.

    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> view = graph.call_function(torch.ops.aten.flatten.using_ints, (x, 1))
    >>> total = graph.call_function(torch.ops.aten.add.Tensor, (view, 1))
    >>> origin(view) is x, origin(total) is total
    (True, True)
    """
    while (source := _source(node)) is not None:
        node = source
    return node


def written(node: Node) -> list[Node]:
    """The arguments that an operation writes to.

    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> written(graph.call_function(torch.ops.aten.relu_.default, (x,)))
    [x]
    """
    return [value for info, value in _aliased(node) if info.is_write]


def writes_between(first: Node, last: Node, read: set[Node]) -> bool:
    """Whether something after `first` and before `last` writes to memory that one of these values lies in."""
    origins = {origin(value) for value in read}
    node = first.next
    while node is not last:
        if any(origin(value) in origins for value in written(node)):
            return True
        node = node.next
    return False


def _source(node: Node) -> Node | None:
    if node.target is operator.getitem or node.target in _UNSAID:
        first: Any = node.args[0]
        return first if isinstance(first, Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(result.alias_info for result in schema.returns):
        return None
    return next((value for _, value in _aliased(node)), None)


def _aliased(node: Node) -> list[tuple[Any, Node]]:
    """The arguments that a schema marks: with what is said of their memory."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    given = [
        (argument.alias_info, node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
        for index, argument in enumerate(schema.arguments)
    ]
    found: list[tuple[Any, Node]] = []
    for info, value in given:
        if info is not None:
            parts: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
            found += [(info, part) for part in parts if isinstance(part, Node)]
    return found
