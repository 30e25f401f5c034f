"""Small networks for the tests of exported files, and how to change such a file."""

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a sum; two outputs with names."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.body = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.point = nn.Conv2d(width, width, 1)
        self.head = nn.Linear(width, 5)

    def forward(self, image):
        x = self.bn1(self.stem(image)).relu()
        x = (self.bn2(self.body(x)) + x).relu()
        x = self.point(x).relu()
        return {"scores": self.head(x.mean((2, 3))), "features": x}


class TwoInputs(nn.Module):
    """Two images with names, of which the sum is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 8, 3)
        self.right = nn.Conv2d(3, 8, 3)
        self.body = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, before, after):
        return self.head(self.body((self.left(before) + self.right(after)).relu()).mean((2, 3)))


class Scaled(nn.Module):
    """A sum after a layer scale that differs so much between channels that int8 loses all of them but one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 4, 1)
        self.register_buffer("scale", torch.tensor([1e4] + [1.0] * 7)[:, None, None])

    def forward(self, image):
        x = self.stem(image).relu()
        return self.head((self.scale * self.body(x) + self.scale * x) / self.scale)


def residual(width: int = 16) -> Residual:
    """A `Residual` whose BatchNorm layers have statistics."""
    torch.manual_seed(0)
    model = Residual(width).eval()
    for norm in (model.bn1, model.bn2):
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.normal_(0, 0.2)
    return model


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def residual_block(dtype=np.float32):
    """x -> a -> relu -> b -> + relu -> mean -> gemm, with a bias that is added by an Add of its own."""
    constants = {"a.w": random(8, 4, 3, 3), "b.w": random(8, 8, 1, 1), "fc.w": random(8, 5), "bias": random(5)}
    nodes = [
        helper.make_node("Conv", ["x", "a.w"], ["a"], name="a", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "b.w"], ["b"], name="b"),
        helper.make_node("Add", ["b", "r"], ["sum"], name="sum"),
        helper.make_node("GlobalAveragePool", ["sum"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "fc.w"], ["m"], name="fc"),
        helper.make_node("Add", ["m", "bias"], ["y"], name="add_bias"),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 4, 6, 6])],
        [helper.make_tensor_value_info("y", kind, ["n", 5])],
        [numpy_helper.from_array(value.astype(dtype), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def images(count: int = 4, size: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def initializer(model, name):
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def set_values(model, name, values):
    initializer(model, name).CopyFrom(numpy_helper.from_array(values, name))


def edited(path, change, target=None):
    """Let a function change the model in a file, and write it, beside it if there is another target."""
    model = onnx.load(path)
    change(model)
    onnx.save(model, target or path)
    return target or path
