import contextlib
from types import SimpleNamespace

import pytest
import torch

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.registry import no_sparse_kernels

GPU = torch.device("cuda", 0)


@pytest.fixture
def turing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")


@pytest.fixture
def ampere(turing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def test_the_reason_names_a_gpu_without_sparse_tensor_cores(turing):
    assert driver.unavailable(torch.device("cpu")) == "sparse tensor cores need an NVIDIA GPU, got cpu"
    assert driver.unavailable(GPU) == "an older GPU has compute capability 7.5; sparse tensor cores need 8.0 or newer"


def test_the_reason_names_a_pytorch_build_without_cuda(ampere, monkeypatch):
    assert driver.unavailable(GPU) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in driver.unavailable(GPU)


def test_an_unsupported_dtype_or_a_missing_compiler_is_a_reason(ampere, monkeypatch):
    monkeypatch.setattr(jit, "unavailable", lambda: "no NVRTC was found")
    assert "got torch.float32: pass dtype=torch.float16" in no_sparse_kernels(GPU, torch.float32)
    assert no_sparse_kernels(GPU, torch.float16) == "no NVRTC was found"
    monkeypatch.setattr(jit, "unavailable", lambda: None)
    assert no_sparse_kernels(GPU, torch.bfloat16) is None


@pytest.mark.parametrize(("recorded", "attributes"), [(0, 0), (1, 1)])
def test_launches_depend_on_the_previous_one_if_the_stream_of_their_own_device_is_recorded(
    recorded, attributes, monkeypatch
):
    current, launched = [0], []

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(driver, "_enter_context", lambda index: None)
    monkeypatch.setattr(driver, "call", lambda name, config, *others: launched.append(config._obj.count))
    kernel = driver.Kernel.__new__(driver.Kernel)
    kernel.device, kernel.shared_bytes, kernel._can_depend, kernel._function = 1, 0, True, None
    kernel.launch((1, 1), 32, [None])
    assert launched == [attributes]
