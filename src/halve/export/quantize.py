"""Put Q/DQ nodes into an ONNX graph: symmetric int8, with zero point 0, so that every zero stays a zero.

Weights are stored as int8, with one scale per output channel. Activations have one scale per tensor: the inputs of
quantised layers, and both inputs of residual sums, so that TensorRT can compute them in int8 too.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halve.export import packages
from halve.export.calibration import LEVELS
from halve.export.file import from_numpy
from halve.export.parts import Parts


def activations_of(model: Any, parts: Parts) -> list[str]:
    """The tensors that get Q/DQ nodes if these layers and sums are quantised, in the order of the graph."""
    wanted = parts.inputs
    given = [value.name for value in model.graph.input]
    produced = [name for node in model.graph.node for name in node.output]
    return [name for name in (*given, *produced) if name in wanted]


def quantize_(model: Any, parts: Parts, limits: Mapping[str, float], dtype: Any) -> None:
    """Quantise some layers and residual sums of a model in place.

    Args:
        model: A model in float32 or float16.
        parts: The layers and sums.
        limits: The largest magnitude of each activation that int8 covers.
        dtype: What the model computes in. Scales have it, as ONNX wants it.
    """
    helper, graph = packages.onnx().helper, model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    before: dict[str, list[Any]] = {}  # nodes to put before the first reader of a tensor
    dequantized: dict[str, str] = {}
    for name in activations_of(model, parts):
        scale = _scales(np.array(limits[name]), dtype)
        graph.initializer.extend(
            [from_numpy(scale, f"{name}/scale"), from_numpy(np.zeros((), np.int8), f"{name}/zero")]
        )
        scaled = [f"{name}/scale", f"{name}/zero"]
        before[name] = [
            helper.make_node("QuantizeLinear", [name, *scaled], [f"{name}/q"], name=f"{name}/QuantizeLinear"),
            helper.make_node(
                "DequantizeLinear", [f"{name}/q", *scaled], [f"{name}/dq"], name=f"{name}/DequantizeLinear"
            ),
        ]
        dequantized[name] = f"{name}/dq"
    for weight, axis in {layer.weight: layer.axis for layer in parts.layers}.items():
        before[weight] = [_store_(graph, tensors[weight], axis, dtype)]
        dequantized[weight] = f"{weight}/dq"
    readers = set(parts.names)
    nodes = []
    for node in graph.node:
        if node.name in readers:
            for position, name in enumerate(node.input[:2]):  # not the bias of a layer
                if name in dequantized:
                    nodes += before.pop(name, [])
                    node.input[position] = dequantized[name]
        nodes.append(node)
    copies = [packages.onnx().NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    _drop_unused_(graph)


def _store_(graph: Any, tensor: Any, axis: int, dtype: Any) -> Any:
    """Store a weight as int8; returns the node that dequantises it."""
    values = packages.onnx().numpy_helper.to_array(tensor)
    quantized, scale = quantized_weight(values, axis, dtype)
    name = tensor.name
    zeros = np.zeros(scale.shape, np.int8)
    parts = {f"{name}/int8": quantized, f"{name}/scale": scale, f"{name}/zero": zeros}
    graph.initializer.extend(from_numpy(value, key) for key, value in parts.items())
    return packages.onnx().helper.make_node(
        "DequantizeLinear", list(parts), [f"{name}/dq"], name=f"{name}/DequantizeLinear", axis=axis
    )


def quantized_weight(values: NDArray[Any], axis: int, dtype: Any) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """A weight as int8, and its scale for each output channel.

    >>> quantized_weight(np.array([[0.25, 0.0, -1.0]], np.float32), 0, np.float32)[0]
    array([[  32,    0, -127]], dtype=int8)
    """
    wide = values.astype(np.float64)
    others = tuple(dim for dim in range(values.ndim) if dim != axis)
    scale = _scales(np.abs(wide).max(axis=others), dtype)
    shape = [-1 if dim == axis else 1 for dim in range(values.ndim)]
    steps = np.rint(wide / scale.astype(np.float64).reshape(shape))
    return np.clip(steps, -LEVELS, LEVELS).astype(np.int8), scale


def _scales(limits: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Scales that cover the limits, in the dtype, and are never zero."""
    wanted = np.where(limits > 0, limits, 1.0).astype(np.float64) / LEVELS
    scale = wanted.astype(dtype)
    low = scale.astype(np.float64) < wanted  # rounded down: the largest value would be cut off
    rounded = np.where(low, np.nextafter(scale, np.array(np.inf, dtype)), scale)
    return np.maximum(rounded, np.finfo(dtype).smallest_subnormal).astype(dtype)


def _drop_unused_(graph: Any) -> None:
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    copies = [type(tensor).FromString(tensor.SerializeToString()) for tensor in kept]
    del graph.initializer[:]
    graph.initializer.extend(copies)
