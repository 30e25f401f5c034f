"""What is known about the values in a captured graph: their channel dimension, and the channels along it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from halve.graph import Part
from halve.permute.trace.axes import Spans, fresh, pin, tie

UNKNOWN = "combined with channels of unknown order"


class Label(NamedTuple):
    """The channel dimension of a value and the channels along it. A value has at most one such dimension."""

    dim: int
    spans: Spans


class Values:
    """The labels of a part's values so far, and the spans of the model's parameters and buffers."""

    def __init__(self, part: Part, dims: dict[tuple[str, int], Spans]) -> None:
        self._part, self._dims = part, dims
        self.labels: dict[Node, Label | list[Label | None] | None] = {}

    def is_weight(self, node: Any) -> bool:
        """Whether a value is a parameter or buffer that can be permuted."""
        known = isinstance(node, Node) and node.op == "placeholder" and node.name in self._part.tensors
        return known and 0 not in node.meta["val"].stride()  # not an expanded tensor

    def along(self, weight: Any, dim: int) -> Spans:
        """The spans along one dimension of a parameter or buffer."""
        tensor = self._part.tensors[weight.name]
        return self._dims.setdefault((tensor, dim), fresh(sizes(weight)[dim]))

    def tie(self, weight: Any, dim: int, spans: Spans) -> None:
        """Tie one dimension of a parameter or buffer to these channels."""
        known = self._dims.setdefault((self._part.tensors[weight.name], dim), spans)
        if known is not spans:
            tie(known, spans)

    def label(self, node: Any) -> Label | None:
        """The label of a value, or None if its channels are unknown or it has none."""
        if self.is_weight(node):
            wide = [dim for dim, size in enumerate(sizes(node)) if size > 1]
            return Label(wide[0], self.along(node, wide[0])) if len(wide) == 1 else None
        found = self.labels.get(node)
        return found if isinstance(found, Label) else None

    def spans(self, node: Any, dim: int, reason: str = UNKNOWN) -> Spans:
        """The channels along `dim` of a value. If they are unknown, the value is pinned and so is the result."""
        label = self.label(node)
        if label is not None and label.dim == dim:
            return label.spans
        self.pin([node], reason)
        return fresh(sizes(node)[dim], reason)

    def meet(self, node: Any, dim: int, spans: Spans) -> None:
        """Tie a dimension of a bias or norm parameter to channels. `node` may be None: no such parameter."""
        if not isinstance(node, Node) or sizes(node)[dim] == 1:
            return
        if self.is_weight(node):
            self.tie(node, dim, spans)
        else:
            self.pin([node], "used as the bias or norm of a layer")
            pin(spans, "combined with a bias or norm that is computed or constant")

    def pin(self, nodes: Sequence[Any], reason: str) -> None:
        """Keep the order of all channels of these values."""
        for node in nodes:
            if self.is_weight(node):
                for dim, size in enumerate(sizes(node)):
                    if size > 1:
                        pin(self.along(node, dim), reason)
            found = self.labels.get(node)
            for label in found if isinstance(found, list) else [found]:
                if label is not None:
                    pin(label.spans, reason)


def sizes(node: Any) -> list[int]:
    """The shape of a value. Dynamic sizes are those of the example."""
    return [size if isinstance(size, int) else int(size.node.hint) for size in node.meta["val"].shape]


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of an operation, whether positional or by keyword."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def dimension(dim: Any, node: Any) -> int:
    """A nonnegative dimension index."""
    return int(dim) % len(sizes(node))
