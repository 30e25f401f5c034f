"""Channel rules for operations without weights: sums, activations, pooling, concatenation, reshaping."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from halve.permute.trace.axes import Span, cut, fresh, pin, resolved, tie, width_of
from halve.permute.trace.layers import Rule
from halve.permute.trace.values import Label, Values, argument, dimension, sizes

_POINTWISE = """_to_copy abs add addcmul alias celu clamp clamp_max clamp_min clone contiguous cos detach div elu erf
exp gelu hardsigmoid hardswish hardtanh leaky_relu lift_fresh_copy log log_softmax logaddexp maximum minimum
mish mul neg ones_like pow prelu reciprocal relu relu6 rsqrt rsub selu sigmoid silu sin softmax softplus sqrt square sub
tanh to true_divide type_as where zeros_like"""  # softmax is not pointwise, but commutes with permutations
_REDUCING = "amax amin linalg_vector_norm mean std sum var"
_POOLING = """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool2d_with_indices max_pool3d
upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_trilinear3d"""
_RESHAPING = "_unsafe_view flatten reshape squeeze unflatten unsqueeze view"
_SPLITTING = "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split"


def pointwise(values: Values, node: Node) -> Label | None:
    """Elementwise operations, with broadcasting."""
    rank = len(sizes(node))
    inputs = [(x, rank - len(sizes(x))) for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
    known = [(label.dim + shift, label.spans) for x, shift in inputs if (label := values.label(x)) is not None]
    known = [(dim, spans) for dim, spans in known if width_of(spans) > 1] or known
    if not known:
        values.pin([x for x, _ in inputs], "combined with no known channels")
        return None
    dim, spans = known[0]
    if width_of(spans) != sizes(node)[dim]:  # one channel, broadcast over channels of unknown order
        values.pin([x for x, _ in inputs], "combined with no known channels")
        return Label(dim, fresh(sizes(node)[dim], "combined with no known channels"))
    if node.target is torch.ops.aten.prelu.default:  # its slopes are along dimension 1, not the last
        if dim == 1:
            values.meet(node.args[1], 0, spans)
        else:
            values.pin([node.args[1]], "not along the channel dimension")
        inputs = inputs[:1]
    for x, shift in inputs:
        own = dim - shift
        width = sizes(x)[own] if own >= 0 else 1
        if values.is_weight(x):
            for other, size in enumerate(sizes(x)):
                if other == own and size > 1:
                    values.tie(x, own, spans)
                elif size > 1:
                    pin(values.along(x, other), "not along the channel dimension")
        elif width > 1:
            tie(spans, values.spans(x, own))
        elif (label := values.label(x)) is not None and label.dim != own and width_of(label.spans) > 1:
            pin(label.spans, "combined with channels along another dimension")
    return Label(dim, spans)


def _labelled(rule: Callable[[Label, Node], Label | None]) -> Rule:
    """A rule for operations on one value with known channels. Without a label, the result has none either."""

    @functools.wraps(rule)
    def apply(values: Values, node: Node) -> Label | None:
        label = values.label(node.args[0])
        return None if label is None else rule(label, node)

    return apply


@_labelled
def reduction(label: Label, node: Node) -> Label | None:
    named = str(node.target).startswith("aten.linalg_vector_norm")
    dims = argument(node, 2 if named else 1, "dim")
    dims = None if isinstance(dims, bool) else dims  # std(x, unbiased): over everything
    rank = len(sizes(node.args[0]))
    gone = {int(d) % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
    if label.dim in gone:
        return None  # a sum over channels is the same in any order
    stays = len(sizes(node)) == rank
    return Label(label.dim if stays else label.dim - sum(d < label.dim for d in gone), label.spans)


def pooling(values: Values, node: Node) -> Any:
    label = values.label(node.args[0])
    name = str(node.target).split(".")[1].removesuffix("_with_indices")
    spatial = int(name[-2])
    if label is not None and label.dim != len(sizes(node.args[0])) - spatial - 1:
        pin(label.spans, "pooled along channels")
        label = None
    return [label, label] if isinstance(node.meta.get("val"), tuple | list) else label


def concatenation(values: Values, node: Node) -> Label | None:
    joined: Any = node.args[0]
    tensors: list[Node] = [x for x in joined if sizes(x) != [0]]  # torch skips empty tensors
    dim = dimension(argument(node, 1, "dim", 0), node)
    known = next((label for x in tensors if (label := values.label(x)) is not None), None)
    if known is None:
        values.pin(tensors, "concatenated with channels of unknown order")
        return None
    if known.dim != dim:  # concatenated along another dimension: all have the same channels
        for x in tensors:
            tie(known.spans, values.spans(x, known.dim))
        return known
    return Label(dim, tuple(span for x in tensors for span in values.spans(x, dim)))


@_labelled
def padding(label: Label, node: Node) -> Label | None:
    widths = argument(node, 1, "pad")
    at = 2 * (len(sizes(node)) - 1 - label.dim)
    if at >= len(widths) or not any(widths[at : at + 2]):
        return label
    if str(node.target).startswith("aten.pad.") and argument(node, 2, "mode", "constant") != "constant":
        pin(label.spans, "padded along channels, not with a constant")
        return None
    spans, (before, after) = label.spans, widths[at : at + 2]
    if before < 0:
        _, spans = cut(spans, -before)
    if after < 0:
        spans, _ = cut(spans, width_of(spans) + after)
    filled = [
        fresh(width) if width > 0 else () for width in (before, after)
    ]  # constant channels: any order is the same
    return Label(label.dim, (*filled[0], *spans, *filled[1]))


@_labelled
def permutation(label: Label, node: Node) -> Label:
    order = [dimension(d, node) for d in argument(node, 1, "dims")]
    return Label(order.index(label.dim), label.spans)


@_labelled
def transposition(label: Label, node: Node) -> Label:
    first, second = (dimension(argument(node, place, f"dim{place - 1}"), node) for place in (1, 2))
    swapped = {first: second, second: first}
    return Label(swapped.get(label.dim, label.dim), label.spans)


@_labelled
def slicing(label: Label, node: Node) -> Label | None:
    x = node.args[0]
    if dimension(argument(node, 1, "dim", 0), x) != label.dim:
        return label
    if argument(node, 4, "step", 1) != 1:
        pin(label.spans, "sliced along channels with a step")
        return None
    start, end, _ = slice(argument(node, 2, "start"), argument(node, 3, "end")).indices(sizes(x)[label.dim])
    spans, _ = cut(label.spans, end)
    _, spans = cut(spans, start)
    return Label(label.dim, spans)


@_labelled
def selection(label: Label, node: Node) -> Label | None:
    dim = dimension(node.args[1], node.args[0])
    if dim == label.dim:
        pin(label.spans, "indexed along channels")
        return None
    return Label(label.dim - (dim < label.dim), label.spans)


def splitting(values: Values, node: Node) -> list[Label | None]:
    x, pieces = node.args[0], list(node.meta["val"])
    label = values.label(x)
    if label is None or dimension(argument(node, 2, "dim", 0), x) != label.dim:
        return [label] * len(pieces)
    result: list[Label | None] = []
    rest = label.spans
    for piece in pieces:
        taken, rest = cut(rest, int(piece.shape[label.dim]))
        result.append(Label(label.dim, taken))
    return result


@_labelled
def expansion(label: Label, node: Node) -> Label | None:
    dim = label.dim + len(sizes(node)) - len(sizes(node.args[0]))
    return Label(dim, label.spans) if sizes(node)[dim] == width_of(label.spans) else None


def creation(values: Values, node: Node) -> None:
    """New tensors: the input only sets their dtype and device."""


@_labelled
def rolling(label: Label, node: Node) -> Label | None:
    dims = [dimension(d, node) for d in argument(node, 2, "dims", ())]
    if not dims or label.dim in dims:
        pin(label.spans, "rolled along channels")
        return None
    return label


@_labelled
def reshaping(label: Label, node: Node) -> Label | None:
    """Channels may change their dimension, or be flattened together with the pixels after them."""
    before, after = sizes(node.args[0]), sizes(node)
    width, inner = before[label.dim], math.prod(before[label.dim + 1 :])
    for dim, size in enumerate(after):
        starts_here = math.prod(after[:dim]) == math.prod(before[: label.dim])
        if starts_here and size % width == 0 and inner % (size // width) == 0 and size:
            times = size // width
            return Label(dim, tuple(Span(axis, repeat * times) for axis, repeat in resolved(label.spans)))
    pin(label.spans, "channels are split or merged by a reshape")
    return None


def _rules(names: str, rule: Rule) -> Iterable[tuple[str, Rule]]:
    return ((name, rule) for name in names.split())


RULES: dict[str, Rule] = {
    **dict(_rules(_POINTWISE, pointwise)),
    **dict(_rules(_REDUCING, reduction)),
    **dict(_rules(_POOLING, pooling)),
    **dict(_rules(_RESHAPING, reshaping)),
    **dict(_rules(_SPLITTING, splitting)),
    **dict(_rules("cat concat", concatenation)),
    **dict(_rules("pad constant_pad_nd", padding)),
    **dict(_rules("expand expand_as", expansion)),
    "permute": permutation,
    "transpose": transposition,
    "swapaxes": transposition,
    **dict(_rules("new_empty new_full new_ones new_zeros", creation)),
    "slice": slicing,
    "select": selection,
    "roll": rolling,
}
