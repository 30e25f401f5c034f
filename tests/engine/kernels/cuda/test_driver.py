import pytest
import torch

from halve.engine import compiled
from halve.engine.kernels.cuda import driver, jit

GPU = torch.device("cuda", 0)


@pytest.fixture
def turing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")


@pytest.fixture
def ampere(turing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def test_a_device_without_sparse_tensor_cores_has_a_reason(turing):
    assert driver.missing(torch.device("cpu")) == "the sparse kernels are for NVIDIA GPUs, and this is cpu"
    assert driver.missing(GPU) == "an older GPU has compute capability 7.5; sparse tensor cores begin with 8.0"


def test_a_pytorch_for_other_gpus_has_a_reason(ampere, monkeypatch):
    assert driver.missing(GPU) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "not built for NVIDIA GPUs" in driver.missing(GPU)


def test_another_type_or_no_compiler_is_a_reason(ampere, monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: "no NVRTC was found")
    assert "not torch.float32: pass dtype=torch.float16" in compiled.missing(GPU, torch.float32)
    assert compiled.missing(GPU, torch.float16) == "no NVRTC was found"
    monkeypatch.setattr(jit, "available", lambda: None)
    assert compiled.missing(GPU, torch.bfloat16) is None
