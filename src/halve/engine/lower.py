"""Insert `Layer` modules into a graph: for fused operations, or for the operators in a loaded file."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.op import run_kernel
from halve.engine.kernels.registry import FAMILIES
from halve.engine.layer import Layer
from halve.engine.operations import Operation


def replace_(module: GraphModule, node: Node, layer: Layer, inputs: Sequence[Any]) -> None:
    """Replace a node by a layer with these inputs."""
    name = _unused_name(module)
    module.add_submodule(name, layer)
    with module.graph.inserting_before(node):
        new = module.graph.call_module(name, tuple(inputs))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def lower_(module: GraphModule) -> list[Layer]:
    """Replace every `halve::run_kernel` in a graph by a layer; returns the layers in execution order."""
    layers: list[Layer] = []
    for node in [node for node in module.graph.nodes if node.target is run_kernel._opoverload]:
        inputs, packed, names, operation, family, variant = node.args
        tensors = {name: get_tensor(module, str(x.target)) for name, x in zip(names.split(), packed, strict=True)}
        layers.append(_layer(str(len(layers)), Operation.from_json(operation), tensors, Kernel(family, variant), node))
        replace_(module, node, layers[-1], inputs)
    drop_unused_(module)
    module.recompile()
    return layers


def _layer(name: str, operation: Operation, packed: dict[str, Tensor], kernel: Kernel, node: Node) -> Layer:
    tensors = FAMILIES[kernel.family].unpack(operation, packed)
    layer = Layer(name, operation, tensors, node.meta["val"].dtype)
    layer.use({1: kernel})
    return layer


def get_tensor(module: nn.Module, path: str) -> Tensor:
    """A parameter, buffer or constant of a graph module, by name."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    tensor: Tensor = value.detach()
    return tensor


def drop_unused_(module: GraphModule) -> None:
    """Delete parameters and buffers that no node reads."""
    for node in [node for node in module.graph.nodes if node.op == "get_attr" and not node.users]:
        module.graph.erase_node(node)
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for owner_name, owner in list(module.named_modules()):
        if isinstance(owner, Layer):
            continue
        for name in [*owner._parameters, *owner._buffers]:
            if ".".join(filter(None, (owner_name, name))) not in read:
                delattr(owner, name)


def move_(body: nn.Module, old: torch.device, new: torch.device) -> None:
    """Let graphs create their tensors on the new device, such as those of `torch.arange`."""

    def moved(value: Any) -> Any:
        return new if isinstance(value, torch.device) and value.type == old.type else value

    for module in body.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
            module.recompile()


def _unused_name(module: torch.nn.Module) -> str:
    """A submodule name that is not taken."""
    number = sum(isinstance(child, Layer) for child in module.children())
    name = f"layer{number}"
    while hasattr(module, name):
        name = f"_{name}"
    return name
