"""What is known of the values in a captured graph: along which dimension their channels lie, and which ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from halve.graph import Part
from halve.permute.trace.axes import Spans, fresh, pin, tie

UNKNOWN = "it meets channels in an unknown arrangement"


class Label(NamedTuple):
    """The channels of one value; every value has at most one dimension of them."""

    dim: int
    spans: Spans


class Values:
    """Labels of a part's values so far, and the spans along the dimensions of the model's parameters and buffers."""

    def __init__(self, part: Part, dims: dict[tuple[str, int], Spans]) -> None:
        self._part, self._dims = part, dims
        self.labels: dict[Node, Label | list[Label | None] | None] = {}

    def is_weight(self, node: Any) -> bool:
        """Whether a value is a parameter or buffer of the model that can be reordered."""
        known = isinstance(node, Node) and node.op == "placeholder" and node.name in self._part.tensors
        return known and 0 not in node.meta["val"].stride()  # one number for many places: an expanded tensor

    def along(self, weight: Any, dim: int) -> Spans:
        """The spans along one dimension of a parameter or buffer."""
        tensor = self._part.tensors[weight.name]
        return self._dims.setdefault((tensor, dim), fresh(sizes(weight)[dim]))

    def tie(self, weight: Any, dim: int, spans: Spans) -> None:
        """The channels along one dimension of a parameter or buffer are these."""
        known = self._dims.setdefault((self._part.tensors[weight.name], dim), spans)
        if known is not spans:
            tie(known, spans)

    def label(self, node: Any) -> Label | None:
        """The channels of a value, None where they are unknown or there are none."""
        if self.is_weight(node):
            wide = [dim for dim, size in enumerate(sizes(node)) if size > 1]
            return Label(wide[0], self.along(node, wide[0])) if len(wide) == 1 else None
        found = self.labels.get(node)
        return found if isinstance(found, Label) else None

    def spans(self, node: Any, dim: int, reason: str = UNKNOWN) -> Spans:
        """The channels along `dim` of a value; pinned where they are not known to lie there."""
        label = self.label(node)
        if label is not None and label.dim == dim:
            return label.spans
        self.pin([node], reason)
        return fresh(sizes(node)[dim], reason)

    def meet(self, node: Any, dim: int, spans: Spans) -> None:
        """A bias or norm (None: it has none) meets channels along one of its dimensions."""
        if not isinstance(node, Node) or sizes(node)[dim] == 1:
            return
        if self.is_weight(node):
            self.tie(node, dim, spans)
        else:
            self.pin([node], "it meets a layer")
            pin(spans, "it meets numbers that are computed or constant")

    def pin(self, nodes: Sequence[Any], reason: str) -> None:
        """All channels of these values stay where they are."""
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
    """The shape of a value, with the example's sizes for what is free."""
    return [size if isinstance(size, int) else int(size.node.hint) for size in node.meta["val"].shape]


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of an operation, however it was passed."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def dimension(dim: Any, node: Any) -> int:
    """A dimension of a value counted from the front."""
    return int(dim) % len(sizes(node))
