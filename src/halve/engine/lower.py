"""Insert `Layer` modules into a graph, and move graphs to other devices."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from halve.engine.layer import Layer


def replace_(module: GraphModule, node: Node, layer: Layer, inputs: Sequence[Any]) -> None:
    """Replace a node by a layer with these inputs."""
    name = _unused_name(module)
    module.add_submodule(name, layer)
    with module.graph.inserting_before(node):
        new = module.graph.call_module(name, tuple(inputs))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def get_tensor(module: nn.Module, path: str) -> Tensor:
    """A parameter, buffer or constant of a graph module, by name. Raises `ValueError` if it is something else."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise ValueError(f"{path} is a {type(value).__name__}, not a tensor")
    return value.detach()


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
