import pytest
import torch
from torch import nn

import halve
from halve.bench import bench
from halve.errors import EngineWarning, OptionError
from halve.machine import device_name
from tests.random_masks import random
from tests.untouched import untouched


def net():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 1)
    ).eval()


def test_without_sparse_kernels_no_mask_pays():
    model, x = net(), random(2, 3, 8, 8)
    with untouched(model), pytest.warns(EngineWarning, match="dense"):
        plan = halve.measure(model, x, seconds=0.01, progress=False)
    assert list(plan) == ["2"]
    assert (plan.device, plan.dtype, plan.batch, plan.image) == (device_name(x.device), "float32", 2, (3, 8, 8))
    assert plan["2"].sparse_ms is None
    assert plan.paying == []
    assert plan.dense_ms > 0
    assert "torch" in plan.versions


def test_a_network_is_planned_once_with_masks_and_once_without(monkeypatch):
    calls = []
    compiled = bench.compile
    monkeypatch.setattr(bench, "compile", lambda *args, **options: calls.append(args[1]) or compiled(*args, **options))
    with pytest.warns(EngineWarning):
        halve.measure(net(), random(2, 3, 8, 8), seconds=0.01, progress=False)
    assert len(calls) == 2
    assert calls.count(None) == 1


@pytest.mark.cpu_kernels
def test_on_a_cpu_with_sparse_kernels_layers_have_both_times():
    plan = halve.measure(net(), random(2, 3, 24, 24), seconds=0.01, progress=False)
    assert plan["2"].dense_ms > 0
    assert plan["2"].sparse_ms > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_layers_have_both_times():
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1)).eval().cuda()
    plan = halve.measure(model, torch.randn(64, 64, 14, 14, device="cuda"), seconds=0.05, progress=False)
    assert plan.dtype == "float16"
    assert plan["0"].dense_ms > 0
    assert plan["0"].sparse_ms > 0


@pytest.mark.parametrize("example", [(), torch.zeros(()), [1]], ids=["nothing", "scalar", "list"])
def test_strange_examples_are_refused(example):
    with pytest.raises(OptionError, match="example must be a tensor"):
        halve.measure(net(), example)
