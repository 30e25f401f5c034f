"""Which dimensions of which weights must be permuted together so that the network computes the same.

The captured graph is walked once. Operations that do not depend on the order of channels pass them on, operations that
combine channels tie them together, and unknown operations pin them.
"""

from typing import Any

from torch import Tensor
from torch.fx import Node

from halve.graph import Captured, Part
from halve.permute.trace import layers, operations
from halve.permute.trace.axes import Spans, pin, resolved
from halve.permute.trace.values import Values

_RULES = layers.RULES | operations.RULES
_TAKE_WEIGHTS = {*layers.RULES.values(), operations.pointwise}  # rules that handle weights themselves


class Channels:
    """The axes of a model's parameters and buffers, for each of their dimensions.

    >>> import torch
    >>> from torch import nn
    >>> from halve.graph import capture
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> channels = Channels(capture(net, torch.zeros(2, 3, 8, 8)))
    >>> channels.along("1.running_mean", 0) == channels.along("3.weight", 1) == channels.along("0.weight", 0)
    True
    >>> channels.along("3.weight", 0)[0].axis.pinned
    'output of the model'
    """

    def __init__(self, captured: Captured) -> None:
        self._dims: dict[tuple[str, int], Spans] = {}
        self.read: set[str] = set()  # the parameters and buffers that an operation reads
        self.add(captured)

    def add(self, captured: Captured) -> None:
        """Also hold for another graph of the same model: what it ties or pins, stays tied or pinned."""
        for part in captured.parts:
            _walk(part, self._dims)
            held = [node for node in part.graph.nodes if node.op == "placeholder" and node.name in part.tensors]
            self.read |= {part.tensors[node.name] for node in held if node.users}

    def pin(self, reason: str) -> None:
        """Let no channel move."""
        for spans in self._dims.values():
            pin(spans, reason)

    def along(self, tensor: str, dim: int) -> Spans | None:
        """The spans along one dimension of a parameter or buffer, or None if it has no known channels."""
        spans = self._dims.get((tensor, dim))
        return None if spans is None else resolved(spans)

    def items(self) -> list[tuple[tuple[str, int], Spans]]:
        """((tensor, dimension), spans) for every dimension with known channels."""
        return [(key, resolved(spans)) for key, spans in self._dims.items()]


def _walk(part: Part, dims: dict[tuple[str, int], Spans]) -> None:
    values = Values(part, dims)
    for node in part.graph.nodes:
        if node.op == "call_function":
            values.labels[node] = _result(values, node)
        elif node.op == "output":
            values.pin(node.all_input_nodes, f"output of {part.name or 'the model'}")


def _result(values: Values, node: Node) -> Any:
    packet = getattr(node.target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else getattr(node.target, "__name__", "")
    if name == "getitem":
        source = values.labels.get(node.args[0])  # type: ignore[arg-type]
        return source[node.args[1]] if isinstance(source, list) else None  # type: ignore[index]
    if not isinstance(node.meta.get("val"), Tensor | tuple | list):
        return None  # a size, for example: no channels
    rule = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    if rule is not None:
        if rule not in _TAKE_WEIGHTS:
            unlabelled = [x for x in node.all_input_nodes if values.is_weight(x) and values.label(x) is None]
            values.pin(unlabelled, f"also read by {name}, outside of its layer")
        return rule(values, node)
    values.pin(node.all_input_nodes, f"read by {name}, which may depend on the order of channels")
    return None
