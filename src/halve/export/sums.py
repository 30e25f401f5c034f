"""Find the residual sums of an ONNX graph: where a branch that a quantised layer ends joins the rest of the network.

TensorRT can compute such a sum in int8 if both of its inputs are quantised. Between the layer and the sum there may be
a bias, layer scale, norm, activation or change of layout, as in ConvNeXt and transformers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halve.export.weights import OTHER_PRODUCTS, PRODUCTS

# Attention is a product of activations with a softmax inside. TensorRT fuses it: a sum in there is no residual.
_STOPS = frozenset((*PRODUCTS, *OTHER_PRODUCTS, "Einsum", "Softmax", "LogSoftmax"))
_SHAPES = frozenset(("Shape", "Size"))
_ELEMENTWISE = frozenset({
    "Abs", "Add", "Cast", "Celu", "Clip", "Cos", "Div", "Dropout", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid",
    "HardSwish", "Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "PRelu", "Reciprocal",
    "Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh", "Where",
})  # fmt: skip
_LAYOUT = frozenset({
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherND", "Pad", "Reshape", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip


@dataclass(frozen=True)
class ResidualSum:
    """A residual sum, and the two tensors that it adds."""

    name: str
    inputs: tuple[str, str]


def residual_sums(model: Any, layers: Collection[str], kind: int) -> list[ResidualSum]:
    """The residual sums that some quantised layers contribute to, in the order of the graph.

    A residual sum adds two activations of the same shape and type. At least one of them comes from a quantised layer,
    with no other residual sum, product or softmax in between. Not residual are sums with what does not depend on the
    input's values, such as a bias, position embedding or attention mask, and sums that are computed from the elements
    of one tensor alone, such as those in a GELU or a rotary embedding.

    Args:
        model: A model whose nodes are sorted and have names.
        layers: The names of the layers that will be quantised.
        kind: The type of what they compute, of `TensorProto`. Sums of others, such as float32 in a float16 model, are
            left out.
    """
    graph = model.graph
    names, shapes, kinds = set(layers), _shapes(graph), _kinds(graph)
    fixed = {tensor.name for tensor in graph.initializer}  # tensors that do not depend on the values of the input
    sources: dict[str, frozenset[str]] = {}  # the tensors whose elements a tensor is made of, one by one
    reached: set[str] = set()  # by a quantised layer
    found = []
    for node in graph.node:
        given = [name for name in node.input if name and name not in fixed]
        outputs = [name for name in node.output if name]
        if not given or node.op_type in _SHAPES:
            fixed.update(outputs)
            continue
        made_of = frozenset[str]().union(*(sources.get(name, frozenset((name,))) for name in given))
        is_sum = _adds_two(node, given, shapes) and len(made_of) > 1
        if is_sum and not reached.isdisjoint(given) and all(kinds.get(name, kind) == kind for name in given):
            found.append(ResidualSum(node.name, (given[0], given[1])))
        if not is_sum and (node.op_type in _ELEMENTWISE or node.op_type in _LAYOUT):
            sources.update(dict.fromkeys(outputs, made_of))
        passes = not is_sum and node.op_type not in _STOPS and not reached.isdisjoint(given)
        if passes or node.name in names:
            reached.update(outputs)
    return found


def _adds_two(node: Any, given: Sequence[str], shapes: Mapping[str, Sequence[object]]) -> bool:
    """Whether a node adds two activations of the same shape; shapes that are not known count as the same."""
    if node.op_type != "Add" or len(given) != 2:
        return False
    one, other = (shapes.get(name) for name in given)
    if one is None or other is None:
        return True
    return len(one) == len(other) and all((a == 1) == (b == 1) for a, b in zip(one, other, strict=True))


def _kinds(graph: Any) -> dict[str, int]:
    """The types of a graph's tensors, as far as the graph says."""
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: kind for value in values if (kind := value.type.tensor_type.elem_type)}


def _shapes(graph: Any) -> dict[str, list[object]]:
    """The shapes of a graph's tensors, as far as the graph says. Sizes that are not fixed have names."""
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    known = {name: found.shape.dim for name, found in types.items() if found.HasField("shape")}
    return {name: [dim.dim_value or dim.dim_param for dim in dims] for name, dims in known.items()}
