import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torchvision.models.convnext import CNBlock
from torchvision.models.swin_transformer import SwinTransformerBlock, SwinTransformerBlockV2
from torchvision.models.vision_transformer import Encoder
from torchvision.ops import SqueezeExcitation

from halve.export.network import prepared
from halve.export.parts import quantizable
from halve.export.sums import residual_sums

FLOAT = onnx.TensorProto.FLOAT
PICTURE = (2, 8, 8, 8)
TOKENS = (2, 9, 8)


class Gated(nn.Module):
    """A gate that is multiplied, and then a sum."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.gate = SqueezeExcitation(8, 4)

    def forward(self, x):
        return self.gate(self.conv(x)) + x


BLOCKS = {  # how to make it, its input, and its sums
    "ConvNeXt": (lambda: CNBlock(8, 1e-6, 0.0), PICTURE, ["add"]),
    "Swin": (lambda: SwinTransformerBlock(8, 2, [4, 4], [0, 0]), PICTURE, ["add", "add_2"]),
    # rolls, and a mask that is added to the logits; in version 2, norms after the layers
    "Swin, shifted": (lambda: SwinTransformerBlock(8, 2, [4, 4], [2, 2]), PICTURE, ["add", "add_2"]),
    "Swin v2, shifted": (lambda: SwinTransformerBlockV2(8, 2, [4, 4], [2, 2]), PICTURE, ["add", "add_2"]),
    "ViT": (
        lambda: Encoder(9, 1, 2, 8, 16, 0.0, 0.0),
        TOKENS,
        ["layers.encoder_layer_0.add", "layers.encoder_layer_0.add_2"],
    ),
    "squeeze and excitation": (Gated, PICTURE, ["add"]),
}


@pytest.mark.parametrize(("make", "shape", "expected"), BLOCKS.values(), ids=BLOCKS.keys())
def test_sums_after_biases_scales_gates_norms_and_layouts_are_residual(make, shape, expected):
    torch.manual_seed(0)
    proto = prepared(make().eval(), (torch.randn(shape),), torch.float32).to_onnx(torch.float32)
    found = residual_sums(proto, [layer.name for layer in quantizable(proto, np.float32)], FLOAT)
    assert [one.name for one in found] == expected  # so no position bias, embedding, mask or gate
    nodes = {node.name: node for node in proto.graph.node}
    assert all((nodes[one.name].op_type, tuple(nodes[one.name].input)) == ("Add", one.inputs) for one in found)


def sums_in(text, layers="abc"):
    """The residual sums of a graph that reads x and writes y, if these of its layers are quantised.

    w is the weight of a layer, v of one that cannot be quantised, and k a constant.
    """
    shape = "float[n, 8, 8, 8]"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({shape} x) => ({shape} y) {{ {text} }}'
    )
    constants = {"w": np.ones((8, 8, 1, 1)), "v": np.ones((8, 8, 1, 1)), "k": np.ones((1, 8, 8, 8))}
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in constants.items())
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    return [one.name for one in residual_sums(model, layers, FLOAT)]


RESIDUAL = {
    "direct": "[a] p = Conv(x, w) [sum] y = Add(p, x)",
    "the layer second": "[a] p = Conv(x, w) [sum] y = Add(x, p)",
    "two layers": "[a] p = Conv(x, w) [b] q = Conv(x, w) [sum] y = Add(p, q)",
    "activation": "[a] p = Conv(x, w) q = Relu(p) [sum] y = Add(q, x)",
    "bias and scale": "[a] p = Conv(x, w) q = Add(p, k) r = Mul(q, k) [sum] y = Add(r, x)",
    "pooling": "[a] p = Conv(x, w) q = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (p) [sum] y = Add(q, x)",
    "concatenation": "[a] p = Conv(x, w) q, r = Split <axis = 1, num_outputs = 2> (p) s = Concat <axis = 1> (r, q) "
    "[sum] y = Add(s, x)",
}
NOT_RESIDUAL = {
    "bias": "[a] p = Conv(x, w) [sum] y = Add(p, k)",
    "computed constant": "[a] p = Conv(x, w) q = Exp(k) [sum] y = Add(p, q)",
    "made from a shape": "[a] p = Conv(x, w) s = Shape(x) q = ConstantOfShape(s) [sum] y = Add(p, q)",
    "gate": "[a] p = Conv(x, w) [product] y = Mul(p, x)",
    "broadcast": "[a] p = Conv(x, w) q = GlobalAveragePool(x) [sum] y = Add(p, q)",
    "no layer": "p = MaxPool <kernel_shape = [1, 1]> (x) q = Add(p, x) [a] y = Conv(q, w)",
    "a layer that cannot be quantised": "[other] p = Conv(x, v) [sum] y = Add(p, x)",
    "concatenation": "[a] p = Conv(x, w) q = Concat <axis = 1> (p, x) [b] r = Conv(x, w) y = Identity(r)",
    "part of an activation function": "[a] p = Conv(x, w) q = Mul(p, p) r = Mul(q, p) [sum] s = Add(p, r) y = Tanh(s)",
    "halves of one tensor": "[a] p = Conv(x, w) q, r = Split <axis = 1, num_outputs = 2> (p) [sum] s = Add(q, r) "
    "y = Concat <axis = 1> (s, s)",
    "behind a softmax": "[a] p = Conv(x, w) q = Softmax(p) [sum] y = Add(q, x)",
    "logits of attention": "[a] p = Conv(x, w) [b] q = Conv(x, w) r = MatMul(p, q) s = MatMul(q, p) "
    "[sum] t = Add(r, s) y = Softmax(t)",
}


@pytest.mark.parametrize("text", RESIDUAL.values(), ids=RESIDUAL.keys())
def test_a_quantised_layer_and_another_activation_are_a_residual_sum(text):
    assert sums_in(text) == ["sum"]


@pytest.mark.parametrize("text", NOT_RESIDUAL.values(), ids=NOT_RESIDUAL.keys())
def test_other_sums_are_not(text):
    assert sums_in(text) == []


def test_a_layer_that_stays_in_float_takes_its_sum_along():
    chain = (
        "[a] p = Conv(x, w) [one] q = Add(p, x) "
        "[b] r = Conv(q, w) s = Relu(r) [two] t = Add(s, q) "
        "[c] u = Conv(t, w) [three] y = Add(u, t)"
    )
    assert sums_in(chain) == ["one", "two", "three"]
    assert sums_in(chain, "ac") == ["one", "three"]
    assert sums_in(chain, "") == []


def test_a_sum_of_sums_has_no_layer():
    text = "[a] p = Conv(x, w) [one] q = Add(p, x) [b] r = Conv(x, w) [two] s = Add(r, x) [three] y = Add(q, s)"
    assert sums_in(text) == ["one", "two"]


def test_shapes_that_the_graph_does_not_say_count_as_equal():
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[n] x, float[n] w) => (float[n] y) '
        "{ [a] p = Conv(x, w) [sum] y = Add(p, x) }"
    )
    assert [one.name for one in residual_sums(model, ["a"], FLOAT)] == ["sum"]
