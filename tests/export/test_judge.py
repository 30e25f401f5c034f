"""NVIDIA's Polygraphy finds the same layers sparse as `check_onnx` does, on every network of experiments/export.py.

It reads weights in a Python loop, about 5 microseconds per block of four: 15 seconds for ResNet-18, minutes for all of
these networks. So they have fewer channels here. The experiment judges them in full, and its record is checked.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

import halve
from halve.export.parts import Parts
from halve.export.quantize import quantize_
from tests.export.nets import initializer, set_values
from tests.export.zoo import NARROW, SIZE, narrow

polygraphy = pytest.importorskip("polygraphy.tools.sparse")

RECORDS = json.loads((Path(__file__).parents[2] / "experiments/results/export.json").read_text())
RECORDED = RECORDS["networks"]


def verdicts(path):
    """What 'polygraphy inspect sparsity' says of each weight that it looks at: whether it is sparse.

    It does not look at int8, so that it gets the same values as floats.
    """
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            set_values(model, tensor.name, numpy_helper.to_array(tensor).astype("float32"))
    judge = polygraphy.SparsityPruner(model)
    with np.errstate(over="ignore"):  # it casts the largest float64
        judge.check()
    return {name: name in judge.sparse_tensors for name in judge.prune_infos}


def agrees(path):
    """Check that Polygraphy and `check_onnx` say the same of each layer; returns the number of sparse ones."""
    theirs, layers = verdicts(path), halve.check_onnx(path).layers
    # Polygraphy does not look at groups: a grouped convolution may be 2:4, which TensorRT does not take
    compared = {layer.name: layer for layer in layers if layer.weight is not None and "grouped" not in layer.reason}
    ours = {name: layer.is_eligible for name, layer in compared.items()}
    assert ours == {name: theirs[layer.weight] for name, layer in compared.items()}
    return sum(ours.values())


@pytest.mark.parametrize("name", NARROW)
def test_it_agrees_on_every_network_in_float16_and_int8(name, tmp_path):
    model = narrow(name)
    masks = halve.prune(model)
    done = halve.export(model, masks, torch.randn(2, 3, SIZE, SIZE), tmp_path / "net.onnx", dtype=torch.float16)
    [layers] = [record["layers"] for record in RECORDED if record["network"] == name]
    assert len(done.check.layers) == layers  # as in the full network
    assert len(done.check.eligible) >= len(masks) > layers // 2
    assert agrees(done.path) == len(done.check.eligible)
    assert agrees(quantized(done.path)) == len(done.check.eligible)


def quantized(path):
    """The file in int8, as `export` quantises it; the ranges of activations, which no weight depends on, are not."""
    proto = onnx.load(path)
    parts = Parts.of(proto, np.float16)
    quantize_(proto, parts, dict.fromkeys(parts.inputs, 1.0), np.float16)
    target = path.with_suffix(".int8.onnx")
    onnx.save(proto, target)
    assert {layer.dtype for layer in halve.check_onnx(target).layers if layer.weight} == {"int8"}
    return target


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record["network"])
def test_it_agreed_on_every_network_in_full(record):
    assert record["polygraphy_agrees"]
    assert 0 < record["masked"] <= record["eligible"] < record["layers"]


def test_it_agreed_on_int8_files_in_full():
    agreed = [record["network"] for record in RECORDS["sums"] if record["polygraphy_agrees"]]
    assert agreed == ["resnet50_v1", "convnext_tiny", "swin_t"]


def test_every_network_of_the_experiment_is_judged():
    assert [record["network"] for record in RECORDED] == list(NARROW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_agrees_on_a_network_with_moved_channels(exported, tmp_path, dtype):
    model, masks, done = exported
    path = done.path
    if dtype != torch.float32:
        path = halve.export(model, masks, torch.randn(2, 3, 8, 8), tmp_path / "net.onnx", dtype=dtype).path
    assert agrees(path) == 2


def test_it_agrees_after_a_zero_is_filled(copied):
    model = onnx.load(copied)
    weight = numpy_helper.to_array(initializer(model, "body.weight")).copy()
    weight[weight == 0] = 1e-3
    set_values(model, "body.weight", weight)
    onnx.save(model, copied)
    assert agrees(copied) == 1


def test_they_do_not_agree_on_grouped_layers_which_tensorrt_does_not_take(tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1, groups=2)).eval()
    with torch.no_grad():
        model[0].weight[:, ::2] = 0
    path = halve.export(model, None, torch.randn(2, 8, 4, 4), tmp_path / "net.onnx").path
    [layer] = halve.check_onnx(path).layers
    assert verdicts(path) == {layer.weight: True}
    assert not layer.is_eligible
