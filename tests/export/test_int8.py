import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer

import halve
from halve.errors import ModelError, OptionError
from halve.export import int8
from halve.export.quantize import quantized_weight
from tests.export.nets import Scaled, TwoInputs, images, initializer, residual
from tests.export.test_judge import agrees
from tests.untouched import untouched

PARTS = ("stem", "body", "head", "add")  # of a small network


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    model = residual()
    masks = halve.prune(model, also="point")
    path = tmp_path_factory.mktemp("int8") / "net.onnx"
    data = images(48)
    with untouched(model):
        done = halve.export(model, masks, images(), path, int8=True, calibrate=data)
    return model, masks, done


def test_every_zero_is_a_zero_in_the_file(quantized):
    model, masks, done = quantized
    sparse, proto = halve.apply(model, masks), onnx.load(done.path)
    for name in masks:
        stored = initializer(proto, f"{name}.weight/int8")
        assert stored.data_type == TensorProto.INT8
        values = numpy_helper.to_array(stored)
        assert not values[sparse.get_submodule(name).weight.detach().numpy() == 0].any()
        assert np.abs(values.astype(int)).max() == 127  # each output channel uses the whole range
        assert not numpy_helper.to_array(initializer(proto, f"{name}.weight/zero")).any()
    assert {layer.dtype for layer in done.check.layers} == {"int8"}
    assert [layer.name for layer in done.check.eligible] == ["body", "point"]
    assert not any(tensor.name == "body.weight" for tensor in proto.graph.initializer)
    assert agrees(done.path) == 2


def test_layers_and_both_inputs_of_sums_are_quantised_in_float16(quantized):
    proto = onnx.load(quantized[2].path)
    produced = {node.output[0]: node.op_type for node in proto.graph.node}
    for node in proto.graph.node:
        if node.op_type == "Add":
            assert [produced[name] for name in node.input] == ["DequantizeLinear"] * 2
        if node.op_type in ("Conv", "Gemm"):
            assert [produced[name] for name in node.input[:2]] == ["DequantizeLinear"] * 2
    for tensor in proto.graph.initializer:
        if tensor.name.endswith("/scale"):
            assert tensor.data_type == TensorProto.FLOAT16
            assert (numpy_helper.to_array(tensor) > 0).all()
        if tensor.name.endswith("/zero"):
            assert not numpy_helper.to_array(tensor).any()
    assert proto.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16


def test_what_it_costs_is_measured_beside_float(quantized):
    found = quantized[2].quantization
    assert (found.images, found.held_out) == (36, 12)
    assert list(found.quality) == ["float32", "float16", "int8"]
    assert found.quality["int8"].error < found.quality["float32"].error + 0.02
    assert found.quality["float16"].error == pytest.approx(found.quality["float32"].error, abs=1e-3)
    assert min(found.distances, key=found.distances.get) == found.method
    assert sorted(found.costs) == ["body", "head", "point", "stem"]
    assert list(found.costs.values()) == sorted(found.costs.values(), reverse=True)
    assert all(0 < cost < 0.05 for cost in found.costs.values())
    assert list(found.sums) == ["add"]
    assert 0 < found.sums["add"] < 0.05
    assert found.left == ()
    assert "4 of 4 layers and 1 of 1 residual sums in int8" in str(quantized[2])


def test_costs_are_those_of_each_layer_alone(quantized):
    model, masks, done = quantized
    held_out = images(48)[36:]
    sparse = halve.apply(model, masks)
    seen = {}
    sparse.head.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output))
    with torch.no_grad():
        sparse(held_out)
    proto = onnx.load(done.path)
    scale = float(numpy_helper.to_array(initializer(proto, "mean/scale")))
    x = torch.clamp(torch.round(seen["x"] / scale), -128, 127) * scale
    weight, scales = quantized_weight(sparse.head.weight.detach().numpy(), 0, np.float32)
    y = x @ torch.from_numpy(weight * scales[:, None]).T + sparse.head.bias.detach()
    assert done.quantization.costs["head"] == pytest.approx(float((y - seen["y"]).norm() / seen["y"].norm()), rel=0.1)


def test_layers_that_cost_too_much_stay_in_float(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    data, path = images(16), tmp_path / "net.onnx"
    free = halve.export(model, None, images(), path, int8=True, calibrate=data).quantization
    done = halve.export(model, None, images(), path, int8=True, calibrate=data, max_drop=free.drop / 1.5)
    assert free.left == ()
    assert 0 < done.quantization.drop <= free.drop / 1.5  # outputs are no class scores: their relative error counts
    left = done.quantization.left
    assert 0 < len(left) < 3
    assert set(left) == set(list(done.quantization.costs)[: len(left)])  # the costliest
    assert {layer.name for layer in done.check.layers if layer.dtype == "float16"} == set(left)


def test_the_cost_of_a_sum_is_the_error_of_its_output_with_its_inputs_quantised(quantized):
    model, masks, done = quantized
    sparse = halve.apply(model, masks)
    with torch.no_grad():
        skip = sparse.bn1(sparse.stem(images(48)[36:])).relu()
        branch = sparse.bn2(sparse.body(skip))
    proto = onnx.load(done.path)
    [added] = [node for node in proto.graph.node if node.op_type == "Add"]
    [first, second] = (initializer(proto, name.replace("/dq", "/scale")) for name in added.input)
    assert added.name == "add"
    rounded = 0
    for tensor, x in ((first, branch), (second, skip)):
        scale = float(numpy_helper.to_array(tensor))
        rounded = rounded + torch.clamp(torch.round(x / scale), -128, 127) * scale
    exact = branch + skip
    assert done.quantization.sums["add"] == pytest.approx(float((rounded - exact).norm() / exact.norm()), rel=0.1)


def test_a_sum_that_costs_too_much_stays_in_float_and_the_layers_do_not(tmp_path):
    torch.manual_seed(0)
    model, data, path = Scaled().eval(), images(16), tmp_path / "net.onnx"
    free = halve.export(model, None, images(), path, int8=True, calibrate=data).quantization
    assert free.left == ()
    assert free.drop > 0.3
    done = halve.export(model, None, images(), path, int8=True, calibrate=data, max_drop=0.1)
    assert done.quantization.left == ("add",)
    assert done.quantization.drop < 0.1
    assert {layer.dtype for layer in done.check.layers} == {"int8"}
    [added] = [node for node in onnx.load(path).graph.node if node.name == "add"]
    assert not any(name.endswith("/dq") for name in added.input)


def test_nothing_is_quantised_if_nothing_may_be_lost(tmp_path):
    torch.manual_seed(0)
    done = halve.export(
        Scaled().eval(), None, images(), tmp_path / "net.onnx", int8=True, calibrate=images(16), max_drop=0
    )
    assert done.quantization.left == ("stem", "body", "head", "add")
    assert {layer.dtype for layer in done.check.layers} == {"float16"}
    assert done.dtype == "float16"
    assert done.check.metadata["halve.dtype"] == "float16"
    assert done.notes == ("nothing is in int8: max_drop is too small for any layer, so all stay in float16",)
    assert not any(node.op_type == "QuantizeLinear" for node in onnx.load(done.path).graph.node)


@pytest.mark.parametrize("kind", ["ConvNeXt", "Swin"])
def test_sums_of_networks_with_layer_scales_and_windows_are_quantised_once_per_tensor(kind, tmp_path):
    torch.manual_seed(0)
    if kind == "ConvNeXt":
        model = ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)], layer_scale=1.0, num_classes=4).eval()
    else:
        model = SwinTransformer([4, 4], 8, [2, 1], [2, 2], [4, 4], num_classes=4).eval()
    masks = halve.prune(model)
    example, data = images(4, 32), images(12, 32)
    done = halve.export(model, masks, example, tmp_path / "net.onnx", int8=True, calibrate=data)
    proto = onnx.load(done.path)
    names, nodes = set(done.quantization.sums), {node.name: node for node in proto.graph.node}
    assert len(names) == {"ConvNeXt": 3, "Swin": 6}[kind]
    produced = {name: node for node in proto.graph.node for name in node.output}
    for name in names:
        assert [produced[tensor].op_type for tensor in nodes[name].input] == ["DequantizeLinear"] * 2
    read = [node.input[0] for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert len(read) == len(set(read))
    assert all(not numpy_helper.to_array(t).any() for t in proto.graph.initializer if t.name.endswith("/zero"))
    assert {layer.name for layer in done.check.eligible} == set(masks)
    assert agrees(done.path) == len(masks)
    assert done.difference < 0.1


class CastingNorm(nn.LayerNorm):
    """A norm that computes in float32 whatever it gets, as many transformers do."""

    def forward(self, x):
        weight, bias = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(x.float(), self.normalized_shape, weight, bias).to(x.dtype)


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.before, self.after = CastingNorm(16), CastingNorm(16)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.after(self.body(self.before(x))))


def test_layers_and_sums_behind_casts_are_quantised_in_float16_as_well(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "net.onnx"
    halve.export(Casting().eval(), None, torch.randn(4, 6, 16), path, int8=True, calibrate=torch.randn(16, 6, 16))
    proto = onnx.load(path)
    assert any(node.op_type == "Cast" for node in proto.graph.node)
    produced = {node.output[0]: node.op_type for node in proto.graph.node}
    read = {node.name: [produced[name] for name in node.input[:2]] for node in proto.graph.node if node.name in PARTS}
    assert read == dict.fromkeys(PARTS, ["DequantizeLinear"] * 2)


class AnotherSum(nn.Module):
    """A network that adds something first if it runs in float16: the sums after it get other numbers."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(channels, 8, 3, padding=1) for channels in (3, 8, 8))
        self.other, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        y = self.stem(x)
        if y.dtype == torch.float16:
            y = y + 1e-3 * self.b(y)
        return self.head((self.a(y) + y).mean((2, 3)) + self.other(x).mean((2, 3)))


def test_ranges_do_not_go_to_another_sum_of_code_that_depends_on_the_dtype(tmp_path):
    torch.manual_seed(0)
    done = halve.export(AnotherSum().eval(), None, images(), tmp_path / "net.onnx", int8=True, calibrate=images(16))
    assert {layer.name for layer in done.check.layers if layer.dtype == "int8"} == {"stem", "other"}
    nodes = {node.name: node for node in onnx.load(done.path).graph.node}
    assert not any(tensor.endswith("/dq") for name in ("add", "add_2") for tensor in nodes[name].input)
    assert set(done.quantization.costs) == {"stem", "other"}
    assert done.quantization.sums == {}
    [note] = done.notes
    assert note == (
        "6 layers and sums stay in float16: the model's code computes their inputs differently than in float32, which "
        "activations are measured in: b, a, head, add and 2 more"
    )


class AfterStem(nn.Module):
    """A network whose second half is a function of itself and of what its first convolution returns."""

    def __init__(self, rest):
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(c, 16, 3, padding=1) for c in (3, 16, 16))
        self.head, self.rest = nn.Linear(16, 6), rest
        self.table = 5 * torch.randn(1, 16, 96, 96)  # not a buffer: it stays in float32, and is cast
        self.queries = nn.Parameter(torch.randn(100, 256))
        self.proj = nn.Linear(256, 16)

    def forward(self, x):
        return self.rest(self, self.stem(x))


def with_table(net, y):
    y = y + net.table.to(y.dtype)
    return net.head((net.a(y) + y).mean((2, 3)))


def in_float32(net, y):
    return net.head((net.a(y).float() + net.b(y).float()).to(y.dtype).mean((2, 3)))


def of_positions(net, y):
    return net.head(net.a(y).mean((2, 3))), net.a(y).argmax(1) + net.b(y).argmax(1)


def with_queries(net, y):
    return net.head(net.a(y).mean((2, 3)) @ net.proj(net.queries).T @ net.proj(net.queries))


@pytest.mark.parametrize(
    ("rest", "expected"), [(with_table, ["add"]), (in_float32, []), (of_positions, []), (with_queries, [])]
)
def test_only_activations_in_the_dtype_of_the_file_are_quantised(rest, expected, tmp_path):
    torch.manual_seed(0)
    model = AfterStem(rest).eval()
    masks = halve.prune(model, progress=False)
    images = torch.randn(12, 3, 96, 96)
    done = halve.export(model, masks, images[:2], tmp_path / "net.onnx", int8=True, calibrate=images, progress=False)
    assert list(done.quantization.sums) == expected
    graph = onnx.load(tmp_path / "net.onnx").graph
    computed = {graph.input[0].name}
    for node in graph.node:  # what depends on the input
        if not computed.isdisjoint(node.input):
            computed.update(node.output)
    assert all(node.input[0] in computed for node in graph.node if node.op_type == "QuantizeLinear")
    sums = {node.name: node for node in graph.node if node.op_type == "Add"}
    for name in expected:
        assert all(source.endswith("/dq") for source in sums[name].input)


def test_networks_with_several_inputs_are_calibrated_on_all_of_them(tmp_path):
    torch.manual_seed(0)
    model, pair = TwoInputs().eval(), (images(), images().flip(0))
    batches = [(images(8), images(8).flip(0), torch.zeros(8)) for _ in range(4)]  # with labels
    done = halve.export(model, halve.prune(model), pair, tmp_path / "net.onnx", int8=True, calibrate=batches)
    assert list(done.inputs) == ["before", "after"]
    assert (done.quantization.images, done.quantization.held_out) == (24, 8)
    assert done.difference < 0.05


def test_large_outputs_are_measured_on_fewer_images(monkeypatch, tmp_path):
    monkeypatch.setattr(int8, "_MOST_VALUES", 1000)
    model = residual()
    done = halve.export(model, None, images(), tmp_path / "net.onnx", int8=True, calibrate=images(96))
    assert (done.quantization.images, done.quantization.held_out) == (72, 8)  # of 24


def test_bad_options_are_errors(tmp_path):
    model, path = residual(), tmp_path / "net.onnx"
    with pytest.raises(OptionError, match="needs images to calibrate on"):
        halve.export(model, None, images(), path, int8=True)
    with pytest.raises(OptionError, match="are for int8=True"):
        halve.export(model, None, images(), path, max_drop=0.1)
    with pytest.raises(OptionError, match="max_drop must be between 0 and 1"):
        halve.export(model, None, images(), path, int8=True, calibrate=images(9), max_drop=2)
    with pytest.raises(OptionError, match="float16 or float32"):
        halve.export(model, None, images(), path, int8=True, calibrate=images(9), dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="no layer that can be quantised"):
        halve.export(nn.Flatten(), None, images(), path, int8=True, calibrate=images(9))
