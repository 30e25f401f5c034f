"""NVIDIA's Polygraphy finds the same layers sparse as `check_onnx` does, on every file that is exported here."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torchvision.models import resnet18

import halve
from tests.export.nets import initializer, set_values

polygraphy = pytest.importorskip("polygraphy.tools.sparse")


def sparse_tensors(path):
    """What 'polygraphy inspect sparsity' lists as sparse. It does not look at int8: dequantised values are the same."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            set_values(model, tensor.name, numpy_helper.to_array(tensor).astype("float32"))
    judge = polygraphy.SparsityPruner(model)
    with np.errstate(over="ignore"):  # it casts the largest float64
        judge.check()
    return judge.sparse_tensors


def agrees(path):
    """Where we find a layer eligible, Polygraphy must find its weight sparse, and the reverse."""
    theirs = sparse_tensors(path)
    # Polygraphy does not look at groups: a grouped convolution may be 2:4, which TensorRT does not take.
    ours = [layer for layer in halve.check_onnx(path).layers if "grouped" not in layer.reason]
    assert {layer.weight for layer in ours if layer.is_eligible} == theirs & {layer.weight for layer in ours}
    return len(theirs)


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


def test_it_agrees_on_a_whole_network(tmp_path):
    model = resnet18(num_classes=10).eval()
    # Polygraphy reads each weight in a Python loop: wide layers stay dense, where it stops at the first block
    masks = halve.prune(model, exclude="layer[234]*")
    path = halve.export(model, masks, torch.randn(2, 3, 32, 32), tmp_path / "net.onnx").path
    assert agrees(path) == len(masks)
