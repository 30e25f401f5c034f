"""What int8 costs each layer and residual sum of a network alone, from one run of it."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halve.export import packages
from halve.export.parts import Parts
from halve.export.quantize import quantize_
from halve.export.runtime import Session


def costs_of(
    exact: Any, parts: Parts, limits: Mapping[str, float], batches: Iterable[tuple[Tensor, ...]]
) -> dict[str, float]:
    """The relative error of the output of each layer and sum when it alone is quantised, by its name.

    Args:
        exact: The network in float32.
        parts: Its layers and sums.
        limits: The largest magnitude of each activation that int8 covers.
        batches: Inputs to measure on.
    """
    session = Session.of(_with_errors(exact, parts, limits))
    names = [f"{name}/{what}" for name in parts.names for what in ("error", "norm")]
    totals = torch.zeros(len(names), dtype=torch.float64)
    for batch in batches:
        totals += torch.stack([value.double().reshape(()) for value in session.run(batch, names)])
    errors = (totals[0::2] / totals[1::2].clamp(min=1e-30)).sqrt().tolist()
    return dict(zip(parts.names, errors, strict=True))


def _with_errors(exact: Any, parts: Parts, limits: Mapping[str, float]) -> Any:
    """A copy of the network with two more outputs per layer and sum: its squared error when quantised, and norm."""
    onnx = packages.onnx()
    helper = onnx.helper
    model = onnx.ModelProto()
    model.CopyFrom(exact)
    by_name = {node.name: node for node in exact.graph.node}
    tensors = {tensor.name: tensor for tensor in exact.graph.initializer}
    for one in parts.each():
        [part] = one
        single = onnx.ModelProto()
        single.graph.node.append(by_name[part.name])
        single.graph.initializer.extend(tensors[name] for name in by_name[part.name].input if name in tensors)
        single.graph.input.extend(helper.make_empty_tensor_value_info(name) for name in one.inputs)
        quantize_(single, one, limits, np.float32)
        prefix = f"{part.name}//"
        for tensor in single.graph.initializer:
            tensor.name = prefix + tensor.name
            model.graph.initializer.append(tensor)
        for node in single.graph.node:
            for place in (node.input, node.output):
                for i, name in enumerate(place):
                    place[i] = name if name in one.inputs or not name else prefix + name
            node.name = prefix + node.name
            model.graph.node.append(node)
        output = by_name[part.name].output[0]
        model.graph.node.extend(
            [
                helper.make_node("Sub", [output, prefix + output], [f"{part.name}/difference"]),
                helper.make_node("ReduceSumSquare", [f"{part.name}/difference"], [f"{part.name}/error"], keepdims=0),
                helper.make_node("ReduceSumSquare", [output], [f"{part.name}/norm"], keepdims=0),
            ]
        )
        for what in ("error", "norm"):
            model.graph.output.append(helper.make_tensor_value_info(f"{part.name}/{what}", onnx.TensorProto.FLOAT, []))
    return model
