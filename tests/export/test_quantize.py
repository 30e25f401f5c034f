import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from halve.export.calibration import LEVELS, measured
from halve.export.parts import Parts
from halve.export.quantize import activations_of, quantize_, quantized_weight
from halve.export.runtime import Session
from tests.export.nets import initializer, random, residual_block

LIMITS = {"x": 4.0, "r": 20.0, "b": 60.0, "f": 10.0}


def test_inputs_of_layers_and_sums_are_quantised_in_the_order_of_the_graph():
    model = residual_block()
    parts = Parts.of(model, np.float32)
    assert activations_of(model, parts) == ["x", "r", "b", "f"]
    assert activations_of(model, Parts(parts.layers)) == ["x", "r", "f"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_quantised_graph_is_valid_and_computes_about_the_same(dtype):
    x = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    model = residual_block(dtype)
    before = Session(model.SerializeToString())
    seen = measured(residual_block(), LIMITS, [(x,)])
    parts = Parts.of(model, dtype)
    assert parts.names == ("a", "b", "fc", "sum")
    quantize_(model, parts, {name: histogram.largest for name, histogram in seen.items()}, dtype)
    onnx.checker.check_model(model, full_check=True)
    expected, found = (session.run([x])[0].float() for session in (before, Session(model.SerializeToString())))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.03


def test_q_and_dq_have_zero_points_of_zero_and_scales_of_the_dtype():
    model = residual_block(np.float16)
    quantize_(model, Parts.of(model, np.float16), LIMITS, np.float16)
    kinds = {tensor.name.rpartition("/")[2]: tensor.data_type for tensor in model.graph.initializer}
    assert kinds == {
        "scale": TensorProto.FLOAT16, "zero": TensorProto.INT8, "int8": TensorProto.INT8, "bias": TensorProto.FLOAT16,
    }  # fmt: skip
    for tensor in model.graph.initializer:
        if tensor.name.endswith("/zero"):
            assert not numpy_helper.to_array(tensor).any()
    assert initializer(model, "fc.w/scale").dims == [5]  # one for each output channel
    assert numpy_helper.to_array(initializer(model, "x/scale")) == pytest.approx(4 / LEVELS, rel=1e-3)
    assert [node.op_type for node in model.graph.node].count("QuantizeLinear") == 4  # weights are stored as int8


def test_a_tensor_is_quantised_once_for_all_of_its_readers():
    model = residual_block()
    quantize_(model, Parts.of(model, np.float32), LIMITS, np.float32)
    inputs = {node.name: list(node.input) for node in model.graph.node if node.name in ("b", "sum")}
    assert inputs == {"b": ["r/dq", "b.w/dq"], "sum": ["b/dq", "r/dq"]}


def test_a_sum_can_be_left_out_while_its_layer_is_quantised():
    model = residual_block()
    quantize_(model, Parts(Parts.of(model, np.float32).layers), LIMITS, np.float32)
    inputs = {node.name: list(node.input) for node in model.graph.node if node.name in ("b", "sum")}
    assert inputs == {"b": ["r/dq", "b.w/dq"], "sum": ["b", "r"]}


def test_layers_that_are_left_out_keep_their_inputs():
    model = residual_block()
    quantize_(model, Parts.of(model, np.float32).named(["fc"]), LIMITS, np.float32)
    nodes = {node.name: node for node in model.graph.node}
    assert list(nodes["b"].input) == ["r", "b.w"]
    assert list(nodes["sum"].input) == ["b", "r"]
    assert list(nodes["fc"].input) == ["f/dq", "fc.w/dq"]
    names = {tensor.name for tensor in model.graph.initializer}
    assert "b.w" in names
    assert "fc.w" not in names  # only its int8 values are stored


def test_every_zero_stays_a_zero_and_no_other_weight_joins_its_block():
    weight = random(16, 8, 3, 3)
    weight[:, ::2] = 0
    stored, scale = quantized_weight(weight, 0, np.float16)
    assert not stored[:, ::2].any()
    assert stored.dtype == np.int8
    assert scale.shape == (16,)
    assert np.abs(stored.astype(int)).max(axis=(1, 2, 3)).tolist() == [LEVELS] * 16  # each channel uses the full range


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_are_covered_by_scales_of_any_dtype(dtype):
    weight = (random(64, 32) * np.logspace(-5, 1, 64)[:, None]).astype(dtype)
    weight[3] = 0
    stored, scale = quantized_weight(weight, 0, dtype)
    assert scale.dtype == dtype
    assert (scale > 0).all()
    assert not stored[3].any()
    error = np.abs(stored * scale[:, None].astype(float) - weight.astype(float))
    assert (error <= 0.51 * scale[:, None].astype(float) + 1e-12).all()


def test_tiny_limits_give_the_smallest_scale_that_is_not_zero():
    stored, scale = quantized_weight(np.full((1, 4), 1e-7, np.float16), 0, np.float16)
    assert float(scale[0]) == np.finfo(np.float16).smallest_subnormal
    assert np.abs(stored).max() <= LEVELS
