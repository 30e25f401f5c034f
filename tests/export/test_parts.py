import numpy as np

from halve.export.parts import Parts, quantizable
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
