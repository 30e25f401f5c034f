"""Chains: neighbouring layers of a network that run in one call."""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from halve.engine.kernels import op
from halve.engine.kernels.kernel import ChainDescription, ChainedLayer, Kernel
from halve.engine.kernels.registry import family_of
from halve.engine.layer import Layer

Shape = tuple[int, ...]


def with_chains(body: GraphModule, kernels: Mapping[Layer, Kernel], shapes: Mapping[Layer, Shape]) -> GraphModule:
    """The network with chains instead of layers, where that is possible. Layers that are alone stay as they are.

    Args:
        body: the fused network.
        kernels: the kernel of each layer, whose family the layer must hold.
        shapes: of the first input of each layer.
    """
    chains = {key: nodes for key, nodes in _chains(body, kernels, shapes).items() if len(nodes) > 1}
    if not chains:
        return body
    return _Rebuilt(body, kernels, chains).module()


def _chains(body: GraphModule, kernels: Mapping[Layer, Kernel], shapes: Mapping[Layer, Shape]) -> dict[int, list[Node]]:
    """The nodes of each chain. No chain depends on another operation that depends on the same chain.

    Each node has a level: the number of times that a path to it leaves a chain. Layers of one level form a chain.
    """
    levels: dict[Node, int] = {}
    found: dict[int, list[Node]] = defaultdict(list)
    members: set[Node] = set()
    kind = None  # all chains have the same, so that none depends on another of its level
    for node in body.graph.nodes:
        layer: Any = body.get_submodule(str(node.target)) if node.op == "call_module" else None
        if layer in kernels and layer in shapes and _can_chain(layer, kernels[layer], shapes[layer]):
            kind = kind or _kind(layer, kernels[layer])
            if kind == _kind(layer, kernels[layer]):
                members.add(node)
        leaves = 0 if node in members else 1
        levels[node] = max((levels[x] + (leaves if x in members else 0) for x in node.all_input_nodes), default=0)
        if node in members:
            found[levels[node]].append(node)
    return found


def _can_chain(layer: Layer, kernel: Kernel, shape: Shape) -> bool:
    family = family_of(kernel)
    return family.chain is not None and family.can_chain(layer.operation, shape)


def _kind(layer: Layer, kernel: Kernel) -> tuple[str | None, torch.dtype]:
    return family_of(kernel).chain, layer.dtype


class Chained(nn.Module):
    """Layers that run in one call. Returns one tensor for each value that is used outside."""

    def __init__(self, layers: Sequence[tuple[Layer, Kernel, tuple[int, ...]]], outputs: Sequence[int]) -> None:
        super().__init__()
        described = []
        self._count = 0
        for layer, kernel, inputs in layers:
            packed = layer.packed(kernel.family)
            described.append(ChainedLayer(layer.operation.to_json(), kernel, tuple(packed), inputs))
            for tensor in packed.values():
                self.register_buffer(f"packed_{self._count}", tensor)
                self._count += 1
        self.dtype = layers[0][0].dtype
        self.description = ChainDescription(tuple(described), tuple(outputs)).to_json()

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        packed = [self.get_buffer(f"packed_{number}") for number in range(self._count)]
        results: list[Tensor] = op.run_chain([x.to(self.dtype) for x in inputs], packed, self.description)
        return results


class _Rebuilt:
    """A graph with chains, each as one node."""

    def __init__(
        self, body: GraphModule, kernels: Mapping[Layer, Kernel], chains: Mapping[int, Sequence[Node]]
    ) -> None:
        self._body, self._kernels, self._chains = body, kernels, chains
        self._key_of = {node: key for key, nodes in chains.items() for node in nodes}
        self._graph = Graph()
        self._new: dict[Node, Node] = {}
        self._graph.set_codegen(body.graph._codegen)  # how the network takes its inputs and returns its outputs
        self._modules: dict[str, nn.Module] = {}

    def module(self) -> GraphModule:
        for node in self._body.graph.nodes:
            if node.op == "placeholder":
                self._copy(node)
        for node in self._body.graph.nodes:
            if node.op == "output":
                self._emit(node)
        root: dict[str, Any] = {}
        for node in self._graph.nodes:
            if node.op == "call_module":
                root[node.target] = self._modules.get(node.target) or self._body.get_submodule(node.target)
            elif node.op == "get_attr":
                root[node.target] = operator.attrgetter(node.target)(self._body)
        return GraphModule(root, self._graph)

    def _emit(self, last: Node) -> None:
        """Add a node after all that it needs. Without recursion, as networks may be deep."""
        waiting = [last]
        while waiting:
            node = waiting[-1]
            missing = [other for other in self._needed(node) if other not in self._new]
            if node in self._new:
                waiting.pop()
            elif missing:
                waiting += missing
            else:
                waiting.pop()
                if node in self._key_of:
                    self._add_chain(self._key_of[node])
                else:
                    self._copy(node)

    def _needed(self, node: Node) -> list[Node]:
        if node not in self._key_of:
            return node.all_input_nodes
        return self._inputs(self._chains[self._key_of[node]])

    def _inputs(self, nodes: Sequence[Node]) -> list[Node]:
        inside = set(nodes)
        return [*dict.fromkeys(other for node in nodes for other in node.all_input_nodes if other not in inside)]

    def _copy(self, node: Node) -> None:
        self._new[node] = self._graph.node_copy(node, lambda other: self._new[other])

    def _add_chain(self, key: int) -> None:
        nodes = self._chains[key]
        inputs = self._inputs(nodes)
        numbers = {node: number for number, node in enumerate([*inputs, *nodes])}
        inside = set(nodes)
        used = [node for node in nodes if any(user not in inside for user in node.users)]
        layers = []
        for node in nodes:
            layer: Any = self._body.get_submodule(str(node.target))
            layers.append((layer, self._kernels[layer], tuple(numbers[x] for x in node.args if isinstance(x, Node))))
        name = f"chain_{len(self._modules)}"
        self._modules[name] = Chained(layers, [numbers[node] for node in used])
        called = self._graph.call_module(name, tuple(self._new[x] for x in inputs))
        for place, node in enumerate(used):
            self._new[node] = self._graph.call_function(operator.getitem, (called, place))
        for node in nodes:
            self._new.setdefault(node, called)
