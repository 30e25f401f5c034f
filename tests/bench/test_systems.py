import sys

import pytest
import torch
from torch import nn

import halve
from halve.bench.systems import SYSTEMS, Case, weight_bytes
from halve.engine.compiled import CUDA_GRAPH, INDUCTOR, JOINS, SPARSE
from halve.errors import EngineError
from tests.engine.nets import compiled
from tests.tiny import convnet, images


@pytest.fixture(scope="module")
def case():
    model = convnet()
    masks = halve.prune(model)
    fast = compiled(model, masks)
    unmasked = compiled(model, halve.MaskSet({}))
    masked = halve.apply(model, masks)

    def eager(with_masks, dtype):
        return (masked if with_masks else model).to(dtype)

    return Case(masked, (images(2),), lambda: fast, lambda: unmasked, eager, torch.float32)


def test_a_case_knows_its_batch_and_its_device(case):
    assert (case.batch, case.on_gpu) == (2, False)


@pytest.mark.parametrize("part", [CUDA_GRAPH, INDUCTOR, JOINS, SPARSE])
def test_notes_say_what_could_not_be_used(case, part, monkeypatch):
    monkeypatch.setitem(case.compiled().plan.uncompiled, part, "not used: too old")
    assert f"{part} not used: too old" in SYSTEMS["halve"](case).note


@pytest.mark.parametrize("name", ["eager", "channels_last", "halve"])
def test_a_system_that_is_ready_gives_what_the_masked_model_gives(case, name):
    ready = SYSTEMS[name](case)
    with torch.no_grad():
        ready.warm_up()
        torch.testing.assert_close(ready.call(), case.masked(*case.inputs), rtol=1e-4, atol=1e-5)
    assert ready.plan == ()


def test_without_masks_the_dense_model_is_compiled(case):
    ready = SYSTEMS["halve_unmasked"](case)
    with torch.no_grad():
        ready.warm_up()
        assert not ready.masked
        dense = case.eager(False, torch.float32)
        torch.testing.assert_close(ready.call(), dense(*case.inputs), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(ready.call(), case.masked(*case.inputs), rtol=1e-2, atol=1e-2)


def test_what_halve_does_without_a_gpu_is_noted(case):
    assert "runs dense: " in SYSTEMS["halve"](case).note
    assert SYSTEMS["eager"](case).note is None


@pytest.mark.parametrize("name", ["best_dense", "torch_semi_structured", "halve_dense"])
def test_systems_that_are_made_of_timed_kernels_need_a_gpu(case, name):
    with pytest.raises(EngineError, match="needs a CUDA GPU"):
        SYSTEMS[name](case)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_exported_models_give_what_the_masked_model_gives(case, name):
    pytest.importorskip(name)
    pytest.importorskip("onnxscript")
    [found] = SYSTEMS[name](case).call()
    with torch.no_grad():
        torch.testing.assert_close(found, case.masked(*case.inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_packages_that_are_missing_are_named(case, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineError, match=f"is not installed: pip install {name} onnx onnxscript"):
        SYSTEMS[name](case)


def test_weights_that_are_shared_count_once():
    first, second = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
    apart = weight_bytes(nn.Sequential(first, second))
    second.weight = first.weight
    assert (apart, weight_bytes(nn.Sequential(first, second))) == (64, 32)
