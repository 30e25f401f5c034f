"""Find the weight of each convolution and matrix product of an ONNX graph, as TensorRT would: back to a constant.

Quantisation, casts and transpositions are followed; anything else in between hides the weight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halve.errors import FileError
from halve.export import packages
from halve.export.file import OnnxFile, graphs_in

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
OTHER_PRODUCTS = {  # that TensorRT does not take as they are
    "QLinearConv": "an operator of onnxruntime's QOperator format: quantise with Q/DQ nodes instead",
    "QLinearMatMul": "an operator of onnxruntime's QOperator format: quantise with Q/DQ nodes instead",
    "ConvInteger": "an integer operator: quantise with Q/DQ nodes instead",
    "MatMulInteger": "an integer operator: quantise with Q/DQ nodes instead",
    "FusedConv": "fused by onnxruntime: use the original model",
    "FusedGemm": "fused by onnxruntime: use the original model",
    "FusedMatMul": "fused by onnxruntime: use the original model",
}
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_COMPUTED = "both factors are computed: it has no weight"
_MAX_STEPS = 64


@dataclass(frozen=True)
class Weight:
    """A constant weight.

    Args:
        name: The name of the tensor that holds it.
        values: It, as the operator reads it: transposed, but neither cast nor dequantised.
        axis: The axis of its input channels.
        dtype: What it is stored as, such as "float16" or "int8".
        quantized: Whether it is read through Q/DQ.
    """

    name: str
    values: NDArray[Any]
    axis: int
    dtype: str
    quantized: bool


@dataclass(frozen=True)
class Product:
    """A convolution or matrix product, and its weight, or the reason why it has none."""

    node: Any
    index: int
    weight: Weight | None
    reason: str | None = None
    groups: int = 1

    @property
    def name(self) -> str:
        """The node's name, or a made-up one that says where it is."""
        return str(self.node.name) or f"{self.node.op_type}[{self.index}]"


def products_in(file: OnnxFile) -> Iterator[Product]:
    """The convolutions and matrix products of a file, in the order of its graph."""
    outer: dict[str, Any] = {}
    index = 0
    for depth, graph in enumerate(graphs_in(file.model.graph)):
        known = _Constants(file, graph, outer)
        for node in graph.node:
            if node.op_type in PRODUCTS and node.domain in ("", "ai.onnx"):
                found = _product(known, node, index)
                inside = depth and found.weight is not None
                yield Product(node, index, None, "inside of control flow (If, Loop)") if inside else found
            elif node.op_type in OTHER_PRODUCTS:
                yield Product(node, index, None, OTHER_PRODUCTS[node.op_type])
            index += 1
        outer = outer or known.initializers


def asymmetric_nodes(file: OnnxFile) -> list[str]:
    """The Q/DQ nodes of the main graph whose zero point is a constant other than 0."""
    known = _Constants(file, file.model.graph, {})
    quantizers = [node for node in file.model.graph.node if node.op_type in _QUANTIZERS and len(node.input) > 2]
    return [_named(node) for node in quantizers if known.is_nonzero(known.tensor(node.input[2]))]


class _Constants:
    """The constants of a graph, and the nodes that produce its other tensors."""

    def __init__(self, file: OnnxFile, graph: Any, outer: dict[str, Any]) -> None:
        self.file = file
        self.initializers = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
        self.sparse = {tensor.values.name for tensor in graph.sparse_initializer}
        self.producers = {name: node for node in graph.node for name in node.output}
        self.folded = self._folded(graph)

    def tensor(self, name: str) -> Any:
        """The constant of that name; None if it is computed or an input."""
        if name in self.initializers:
            return self.initializers[name]
        node = self.producers.get(name)
        if node is None or node.op_type != "Constant":
            return None
        return next((one.t for one in node.attribute if one.name == "value" and one.HasField("t")), None)

    def is_nonzero(self, tensor: Any) -> bool:
        """Whether a tensor is a constant with a value other than 0."""
        return tensor is not None and bool(np.any(self.file.values(tensor) != 0))

    def _folded(self, graph: Any) -> set[str]:
        """The tensors that depend on constants only. Nodes are sorted."""
        found: set[str] = set()
        for node in graph.node:
            if all(not name or name in found or name in self.initializers for name in node.input):
                found |= set(node.output)
        return found


def _product(known: _Constants, node: Any, index: int) -> Product:
    groups = integer(node, "group", 1) if node.op_type.startswith("Conv") else 1
    operands = node.input[1:2] if node.op_type.startswith("Conv") else node.input[:2]
    found = [_traced(known, name, node) for name in operands]
    # of the two factors of a matrix product, the second is usually the weight
    for position, weight in reversed(list(enumerate(found, start=2 - len(found)))):
        if isinstance(weight, Weight):
            axis = _input_axis(node, position, weight.values.ndim)
            if axis is None:
                return Product(node, index, None, f"its weight has {weight.values.ndim} dimensions", groups)
            placed = Weight(weight.name, weight.values, axis, weight.dtype, weight.quantized)
            return Product(node, index, placed, None, groups)
    reason = str(found[-1]) if found else "it has no weight"
    return Product(node, index, None, reason, groups)


def _input_axis(node: Any, position: int, dims: int) -> int | None:
    """The axis of a weight that its input channels are on; None if that is unclear."""
    if node.op_type.startswith("Conv"):
        return None if dims < 3 else 1 if node.op_type == "Conv" else 0
    if dims < 2 or (node.op_type == "Gemm" and dims > 2):
        return None
    transposed = node.op_type == "Gemm" and bool(integer(node, "transA" if position == 0 else "transB", 0))
    second = position == 1
    return dims - 2 if second != transposed else dims - 1


def _traced(known: _Constants, name: str, user: Any) -> Weight | str:
    """The constant behind a tensor, with the transpositions on the way applied; otherwise what is in between."""
    permutations: list[Sequence[int] | None] = []
    quantized = False
    points: list[Any] = []
    for _ in range(_MAX_STEPS):
        tensor = known.tensor(name)
        if tensor is not None:
            values = known.file.values(tensor)
            for order in reversed(permutations):
                if order is not None and sorted(order) != list(range(values.ndim)):
                    return f"a Transpose before it has the invalid order {list(order)[:8]}"
                values = np.transpose(values, order)
            if any(map(known.is_nonzero, points)):
                return "it is quantised with a zero point other than 0: TensorRT takes symmetric quantisation only"
            return Weight(tensor.name or name, values, 0, _dtype_name(tensor.data_type), quantized)
        node = known.producers.get(name)
        if name in known.sparse:
            return "its weight is stored as a sparse initializer: store it as a plain one"
        if node is None:
            return _COMPUTED if user.op_type == "MatMul" else "its weight is an input"
        if node.op_type in _QUANTIZERS:
            quantized = True
            if len(node.input) > 2 and node.input[2]:
                point = known.tensor(node.input[2])
                if point is None:
                    return f"the zero point of {_named(node)} is not a constant"
                points.append(point)
        elif node.op_type == "Transpose":
            permutations.append(integers(node, "perm"))
        elif node.op_type != "Cast":
            return _hidden(known, node, user)
        name = node.input[0] if node.input else ""
    return f"more than {_MAX_STEPS} nodes are between it and a constant"


def _hidden(known: _Constants, node: Any, user: Any) -> str:
    if known.folded.isdisjoint(node.output):
        return _COMPUTED if user.op_type == "MatMul" else "its weight is computed"
    return (
        f"its weight goes through {_named(node)}, which hides it: fold constants first, "
        f"for example with 'polygraphy surgeon sanitize --fold-constants'"
    )


def _named(node: Any) -> str:
    return f"{node.op_type} {node.name[:80]!r}" if node.name else str(node.op_type)


def integer(node: Any, name: str, default: int) -> int:
    """The value of a node's attribute that is a number."""
    found = next((one for one in node.attribute if one.name == name), None)
    if found is None:
        return default
    if not found.HasField("i"):
        raise FileError(f"the file is damaged: the attribute {name} of {_named(node)} is not an integer")
    return int(found.i)


def integers(node: Any, name: str) -> list[int] | None:
    """The value of a node's attribute that is a list of numbers; None if it is not there."""
    found = next((one for one in node.attribute if one.name == name), None)
    return None if found is None else list(found.ints)


def _dtype_name(data_type: int) -> str:
    name = str(packages.onnx().TensorProto.DataType.Name(data_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)
