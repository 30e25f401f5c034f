"""The engine's operations in a graph -> layers that can run in several ways (see layer.py)."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from halve.engine import ops
from halve.engine.geometry import Geometry
from halve.engine.kernels.mma_sp import packing as pack
from halve.engine.layer import Layer

_OPERATIONS = (ops.conv2d, ops.linear, ops.packed_conv2d, ops.packed_linear)
_TARGETS = {operation._opoverload: operation for operation in _OPERATIONS}


def lower_(module: GraphModule) -> list[Layer]:
    """Put a `Layer` in the place of each operation whose weight the module holds; all of them, as they run."""
    layers = []
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _TARGETS]
    for number, node in enumerate(nodes):
        layer = _layer(module, node, node.meta.get("layer", str(number)))
        if layer is None:
            continue
        name = _free_name(module, f"layer{number}")
        module.add_submodule(name, layer)
        residual = _arguments(node)["residual"]
        with module.graph.inserting_before(node):
            new = module.graph.call_module(name, (node.args[0], residual))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        layers.append(layer)
    for held in [node for node in module.graph.nodes if node.op == "get_attr" and not node.users]:
        module.graph.erase_node(held)
        _forget(module, str(held.target))
    module.recompile()
    return layers


def _free_name(module: GraphModule, name: str) -> str:
    """That the model does not use itself."""
    return name if not hasattr(module, name) else _free_name(module, f"_{name}")


def _layer(module: GraphModule, node: Node, name: str) -> Layer | None:
    given = _arguments(node)
    tensors: dict[str, Tensor | None] = {}
    for key in ("weight", "values", "metadata", "bias"):
        argument = given.get(key)
        if isinstance(argument, Node) and argument.op != "get_attr":
            return None  # computed along the way
        tensors[key] = None if argument is None else _held(module, str(argument.target))
    linear = node.target in (ops.linear._opoverload, ops.packed_linear._opoverload)
    weight = tensors["weight"]
    if weight is None:
        values, metadata = tensors["values"], tensors["metadata"]
        assert values is not None
        x: Any = node.args[0]
        shape = (given["rows"], int(x.meta["val"].shape[-1])) if linear else tuple(given["shape"])
        weight = pack.restored(values, metadata, shape)
    sizes: dict[str, Any] = {key: tuple(given[key]) for key in ("stride", "padding", "dilation") if not linear}
    kernel = (1, 1) if linear else (int(weight.shape[2]), int(weight.shape[3]))
    sizes |= {"kernel": kernel, "groups": given.get("groups", 1), "activation": given["activation"]}
    geometry = Geometry(len(weight), int(weight.shape[1]), **sizes)
    return Layer(name, geometry, weight, tensors["bias"], linear=linear)


def _arguments(node: Node) -> dict[str, Any]:
    """By name, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def _held(module: torch.nn.Module, path: str) -> Tensor:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    tensor: Tensor = value.detach()
    return tensor


def _forget(module: torch.nn.Module, path: str) -> None:
    """Drop a tensor that nobody reads any more."""
    parent, _, name = path.rpartition(".")
    owner = module.get_submodule(parent)
    if hasattr(owner, name):
        delattr(owner, name)
