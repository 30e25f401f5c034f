import numpy as np
from onnx import helper, numpy_helper

from halve.export.parts import Parts, in_both, quantizable
from tests.export.nets import residual_block


def test_layers_with_constant_weights_can_be_quantised_along_their_output_channels():
    found = {
        layer.name: (layer.activation, layer.weight, layer.axis) for layer in quantizable(residual_block(), np.float32)
    }
    assert found == {"a": ("x", "a.w", 0), "b": ("r", "b.w", 0), "fc": ("f", "fc.w", 1)}


def test_transposed_convolutions_and_products_of_activations_cannot():
    model = residual_block()
    for node in model.graph.node:
        if node.name == "a":
            node.op_type = "ConvTranspose"
        if node.name == "fc":
            node.input[1] = "f"
    assert [layer.name for layer in quantizable(model, np.float32)] == ["b"]


def test_parts_are_layers_and_the_sums_that_they_contribute_to():
    parts = Parts.of(residual_block(), np.float32)
    assert parts.names == ("a", "b", "fc", "sum")
    assert parts.inputs == {"x", "r", "b", "f"}
    assert parts.named(["sum", "fc", "nothing", "a"]).names == ("fc", "a", "sum")
    assert [one.names for one in parts.each()] == [("a",), ("b",), ("fc",), ("sum",)]
    assert [part.inputs for part in parts] == [("x",), ("r",), ("f",), ("b", "r")]
    assert Parts.of(residual_block(), np.float16) == Parts()


def with_another_sum(model):
    """Add a layer's output to another layer's input, as code that depends on the dtype may; sums are numbered."""
    nodes = list(model.graph.node)
    at = next(i for i, node in enumerate(nodes) if node.name == "b")
    weight = numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "extra.w")
    model.graph.initializer.append(weight)
    added = [
        helper.make_node("Conv", ["r", "extra.w"], ["e"], name="extra"),
        helper.make_node("Add", ["e", "r"], ["r2"], name="sum"),
    ]
    for node in nodes[at:]:
        node.input[:] = ["r2" if name == "r" else name for name in node.input]
        node.name = {"sum": "sum_2"}.get(node.name, node.name)
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *added, *nodes[at:]])
    return model


def test_parts_of_two_models_are_the_same_if_they_read_results_of_the_same_layers():
    one, other = residual_block(), residual_block()
    for node in other.graph.node:
        node.output[:] = [f"{name}.other" if name != "y" else name for name in node.output]
        node.input[:] = [
            name if name in ("x", "a.w", "b.w", "fc.w", "bias") else f"{name}.other" for name in node.input
        ]
    parts, others = Parts.of(one, np.float32), Parts.of(other, np.float32)
    assert parts.inputs != others.inputs
    assert in_both(one, parts, other, others) == parts


def test_a_sum_with_the_name_of_another_one_is_not_the_same():
    one, other = residual_block(), with_another_sum(residual_block())
    parts, others = Parts.of(one, np.float32), Parts.of(other, np.float32)
    assert others.names == ("a", "extra", "b", "fc", "sum", "sum_2")
    assert in_both(one, parts, other, others).names == ("a",)
    assert in_both(other, others, one, parts).names == ("a",)
