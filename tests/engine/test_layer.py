import pytest
import torch

from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.mma_sp.launch import TILES
from halve.engine.kernels.registry import FALLBACK, FAMILIES
from halve.engine.layer import Layer
from halve.engine.operations import Convolution, Linear
from tests.engine.nets import SPARSE
from tests.random_masks import random


def two_of_four(*shape):
    weight = random(*shape)
    weight[:, [1, 3]] = 0
    return weight


def conv_layer(dtype=torch.float32, activation="relu"):
    operation = Convolution(8, 4, (3, 3), padding=(1, 1), activation=activation)
    return Layer("conv", operation, {"weight": two_of_four(8, 4, 3, 3).to(dtype), "bias": random(8, seed=1)})


def linear_layer():
    return Layer("fc", Linear(8, 4, "gelu"), {"weight": two_of_four(8, 4), "bias": random(8, seed=1)})


@pytest.mark.parametrize(
    "kernel", [Kernel("dense", "cudnn"), Kernel("dense", "gemm"), SPARSE, Kernel("mma", "32x32k8")]
)
def test_every_kernel_gives_the_same_result(kernel):
    for layer, x, residual in (
        (conv_layer(), random(2, 4, 5, 5, seed=2), random(2, 8, 5, 5, seed=3)),
        (linear_layer(), random(2, 3, 4, seed=2), random(2, 3, 8, seed=3)),
    ):
        with_residual, without = layer(x, residual), layer(x)
        layer.use({1: kernel})
        torch.testing.assert_close(layer(x, residual), with_residual)
        torch.testing.assert_close(layer(x), without)


def test_the_nearest_planned_size_is_used():
    layer = conv_layer()
    layer.use({25: FALLBACK, 1000: SPARSE})
    assert [layer.kernel_for(size) for size in (1, 25, 100, 200, 5000)] == [FALLBACK] * 3 + [SPARSE] * 2


def test_only_needed_packed_tensors_are_kept_and_packing_is_lossless():
    layer = conv_layer(torch.float16)
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    for kernel in (SPARSE, Kernel("mma", "64x64"), FALLBACK, SPARSE, FALLBACK):
        layer.use({1: kernel})
        assert layer.held == [kernel.family]
        held = {name.removeprefix(f"{kernel.family}_") for name, _ in layer.named_buffers()}
        assert held == set(layer.packed(kernel.family))
        assert all(torch.equal(layer.tensors()[name], tensor) for name, tensor in before.items())


def test_another_dtype_keeps_the_bias_exact():
    layer = conv_layer()
    bias = layer.tensors()["bias"].clone()
    layer.use({1: SPARSE})
    layer.cast_(torch.bfloat16)
    assert layer.dtype == layer.tensors()["weight"].dtype == torch.bfloat16
    assert torch.equal(layer.tensors()["bias"], bias)
    assert layer.held == ["dense"]
    assert layer(random(2, 4, 5, 5)).dtype == torch.bfloat16  # inputs in another dtype are cast


def test_available_kernels(monkeypatch):
    gpu = torch.device("cuda")
    for family in FAMILIES.values():
        if family.device_type != "cpu":
            monkeypatch.setattr(type(family), "unavailable", lambda self, device, dtype: None)
    ours = [Kernel(family, tile) for family in ("mma_sp", "mma") for tile in TILES]
    layer = conv_layer(torch.float16)
    assert layer.available_kernels(gpu) == [FALLBACK, Kernel("dense", "cudnn"), *ours]
    assert layer.sparse_kernels(gpu) == ours[: len(TILES)]
    assert conv_layer(torch.float32).available_kernels(gpu) == [FALLBACK, Kernel("dense", "cudnn")]
    dense = Layer("fc", Linear(8, 4), {"weight": random(8, 4).half()})
    assert not dense.is_2_4
    assert not dense.sparse_kernels(gpu)
    grouped = Layer("g", Convolution(8, 2, groups=2), {"weight": two_of_four(8, 4)[:, :2, None, None].half()})
    assert grouped.available_kernels(gpu) == [FALLBACK]


def test_a_memory_format_does_not_reorder_packed_tensors():
    layer = conv_layer(torch.float16)
    layer.use({1: SPARSE})
    layer.to(memory_format=torch.channels_last)
    assert all(buffer.is_contiguous() for buffer in layer.buffers())
