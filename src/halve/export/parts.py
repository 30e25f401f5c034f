"""What can be quantised in an ONNX network: its layers, and the residual sums that they contribute to."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halve.export import packages
from halve.export.file import OnnxFile
from halve.export.sums import ResidualSum, residual_sums
from halve.export.weights import PRODUCTS, products_in

_OPERATORS = ("Conv", "Gemm", "MatMul")  # transposed convolutions stay in float


@dataclass(frozen=True)
class Quantizable:
    """A layer that can be quantised, and what it reads."""

    name: str
    activation: str  # the tensor
    weight: str  # the initializer
    axis: int  # of the weight's output channels

    @property
    def inputs(self) -> tuple[str, ...]:
        """The activations that it reads."""
        return (self.activation,)


@dataclass(frozen=True)
class Parts:
    """Layers and residual sums of a network."""

    layers: tuple[Quantizable, ...] = ()
    sums: tuple[ResidualSum, ...] = ()

    @classmethod
    def of(cls, model: Any, dtype: Any) -> "Parts":
        """All that can be quantised in a model, of what it computes in a dtype; in the order of the graph."""
        layers = tuple(quantizable(model, dtype))
        return cls(layers, residual_sums_of(model, layers, dtype))

    def __iter__(self) -> Iterator[Quantizable | ResidualSum]:
        yield from self.layers
        yield from self.sums

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self)

    @property
    def inputs(self) -> frozenset[str]:
        """The activations that they read."""
        return frozenset(name for part in self for name in part.inputs)

    def named(self, names: Collection[str]) -> "Parts":
        """Those with these names, in the order of the names."""
        layers, sums = {layer.name: layer for layer in self.layers}, {one.name: one for one in self.sums}
        return Parts(
            tuple(layers[name] for name in names if name in layers), tuple(sums[name] for name in names if name in sums)
        )

    def each(self) -> Iterator["Parts"]:
        """Each of them by itself."""
        yield from (Parts(layers=(layer,)) for layer in self.layers)
        yield from (Parts(sums=(one,)) for one in self.sums)


def in_both(one: Any, parts: Parts, other: Any, others: Parts) -> Parts:
    """The parts of a model that are the same in another one, of the same network in another dtype.

    These have the same name there, and read the results of the same layers. A name alone is not enough: sums are
    numbered, and code that depends on the dtype may add one before the others.

    Args:
        one: A model.
        parts: Its parts.
        other: The other model.
        others: Its parts.
    """
    names = [{node.name for node in model.graph.node if node.op_type in PRODUCTS} for model in (one, other)]
    here, there = (_origins(model, names[0] & names[1]) for model in (one, other))
    known = {part.name: [there.get(name) for name in part.inputs] for part in others}
    return parts.named(
        [part.name for part in parts if known.get(part.name) == [here.get(name) for name in part.inputs]]
    )


def _origins(model: Any, named: Collection[str]) -> dict[str, frozenset[str]]:
    """The inputs and products that each tensor is computed from, without another product in between.

    Products are told apart by their name if it is among those given, otherwise only by their kind.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    found = {value.name: frozenset((value.name,)) for value in model.graph.input if value.name not in constants}
    for node in model.graph.node:
        made_of = frozenset[str]().union(*(found.get(name, frozenset()) for name in node.input))
        if node.op_type in PRODUCTS:
            made_of = frozenset((node.name if node.name in named else node.op_type,))
        found.update(dict.fromkeys(node.output, made_of))
    return found


def quantizable(model: Any, dtype: Any) -> list[Quantizable]:
    """The layers that can be quantised: those that multiply an activation by an initializer, both in this dtype."""
    kind = _kind_of(dtype)
    constants = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    found = []
    for product in products_in(OnnxFile(Path(), model, 0)):
        node, weight = product.node, product.weight
        if weight is None or node.op_type not in _OPERATORS or constants.get(node.input[1]) != kind:
            continue
        if node.input[0] in constants:  # a layer of a parameter, such as the queries of a detector
            continue
        if node.op_type != "Conv" and weight.values.ndim != 2:
            continue
        axis = 1 - weight.axis  # a weight has input and output channels on its first two axes, in either order
        found.append(Quantizable(product.name, node.input[0], node.input[1], axis))
    return found


def residual_sums_of(model: Any, layers: Iterable[Quantizable], dtype: Any) -> tuple[ResidualSum, ...]:
    """The residual sums that some layers contribute to if they are quantised."""
    return tuple(residual_sums(model, [layer.name for layer in layers], _kind_of(dtype)))


def _kind_of(dtype: Any) -> int:
    kind: int = packages.onnx().helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return kind
