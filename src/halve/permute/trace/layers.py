"""Channel rules for operations with weights: convolutions, Linear, norms."""

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from halve.permute.trace.axes import Span, Spans, cut, fresh, pin, resolved, width_of
from halve.permute.trace.values import UNKNOWN, Label, Values, argument, sizes

Rule = Callable[[Values, Node], Any]
_READS = "input of the model, or channels of unknown order"


def convolution(values: Values, node: Node) -> Label:
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    groups = argument(node, 6, "groups", 1)
    dim = len(sizes(x)) - len(sizes(weight)) + 1  # 1, or 0 for a single image
    read = values.spans(x, dim, _READS)
    if not values.is_weight(weight):
        return Label(dim, _computed(values, node, dim, read))
    if groups == 1:
        values.tie(weight, 1, read)
        made = values.along(weight, 0)
    elif groups == width_of(read):  # depthwise: each output channel belongs to one input channel
        times = sizes(weight)[0] // groups
        made = tuple(Span(axis, repeat * times) for axis, repeat in resolved(read))
        values.tie(weight, 0, made)
    else:
        pin(read, "read by a grouped convolution")
        pin(values.along(weight, 1), "read by a grouped convolution")
        made = rest = values.along(weight, 0)
        for _ in range(groups - 1):  # channels may move within their group
            _, rest = cut(rest, sizes(weight)[0] // groups)
    values.meet(bias, 0, made)
    return Label(dim, made)


def transposed(values: Values, node: Node) -> Label:
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    dim = len(sizes(x)) - len(sizes(weight)) + 1
    read = values.spans(x, dim, _READS)
    if not values.is_weight(weight):
        return Label(dim, _computed(values, node, dim, read))
    if argument(node, 6, "groups", 1) != 1:
        pin(read, "read by a grouped convolution")
        values.pin([weight, bias], "used by a grouped transposed convolution")
        return Label(dim, fresh(sizes(node)[dim], "written by a grouped transposed convolution"))
    values.tie(weight, 0, read)
    made = values.along(weight, 1)
    values.meet(bias, 0, made)
    return Label(dim, made)


def linear(values: Values, node: Node) -> Label:
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    last = len(sizes(x)) - 1
    read = values.spans(x, last, _READS)
    if not values.is_weight(weight):
        return Label(last, _computed(values, node, last, read))
    values.tie(weight, 1, read)
    made = values.along(weight, 0)
    values.meet(bias, 0, made)
    return Label(last, made)


def _computed(values: Values, node: Node, dim: int, read: Spans) -> Spans:
    pin(read, "read by a layer whose weight is computed")
    values.pin(node.all_input_nodes, "used to compute a weight")
    return fresh(sizes(node)[dim], "written by a layer whose weight is computed")


def batch_norm(values: Values, node: Node) -> Label | list[Label]:
    spans = values.spans(node.args[0], 1, UNKNOWN)
    for tensor in node.args[1:5]:
        values.meet(tensor, 0, spans)
    label = Label(1, spans)
    return (
        [label] if isinstance(node.meta.get("val"), tuple | list) else label
    )  # the saved statistics have no channels to track


def layer_norm(values: Values, node: Node) -> Label | None:
    x, shape = node.args[0], argument(node, 1, "normalized_shape")
    affine = [argument(node, 2, "weight"), argument(node, 3, "bias")]
    label = values.label(x)
    first = len(sizes(x)) - len(shape)
    if label is None or label.dim < first:
        values.pin(affine, "normalizes other dimensions than channels")
        return label
    for tensor in affine:
        values.meet(tensor, label.dim - first, label.spans)
    return label


def group_norm(values: Values, node: Node) -> Label:
    x, groups = node.args[0], argument(node, 1, "num_groups")
    spans = rest = values.spans(x, 1, UNKNOWN)
    for _ in range(groups - 1):  # channels may move within their group
        _, rest = cut(rest, sizes(x)[1] // groups)
    for tensor in (argument(node, 2, "weight"), argument(node, 3, "bias")):
        values.meet(tensor, 0, spans)
    return Label(1, spans)


RULES: dict[str, Rule] = {
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "conv_transpose1d": transposed,
    "conv_transpose2d": transposed,
    "conv_transpose3d": transposed,
    "linear": linear,
    "_native_batch_norm_legit_no_training": batch_norm,
    "batch_norm": batch_norm,
    "instance_norm": batch_norm,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
}
