"""A kernel family defined in this file is matched, planned, run, saved and loaded without changes to the engine."""

import time

import pytest
import torch
from torch import nn

import halve
from halve.engine import timing_cache
from halve.engine.kernels import registry
from halve.engine.kernels.kernel import Kernel, KernelFamily, Layout, Piece
from halve.engine.operations import ChainedConvolution, Convolution, JoinedConvolution, Linear, PooledConvolution
from tests.random_masks import random


class Gathered(KernelFamily):
    """2:4 Linear layers on a CPU, packed as the kept columns of each row and their indices."""

    name, sparse, reads, version = "gathered", True, Layout.ANY, "1"

    def unavailable(self, device, dtype):
        return None if device.type == "cpu" and dtype == torch.float32 else "gathered runs on CPUs in float32"

    def variants(self, piece, device):
        return ["plain", "slow"] if isinstance(piece.operation, Linear) and piece.is_2_4 else []

    def pack(self, operation, tensors):
        weight = tensors["weight"]
        columns = (weight != 0).to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : weight.shape[1] // 2]
        packed = {"values": weight.gather(1, columns), "columns": columns}
        return {**packed, "bias": tensors["bias"]} if "bias" in tensors else packed

    def unpack(self, operation, packed):
        weight = packed["values"].new_zeros(operation.weight_shape).scatter(1, packed["columns"], packed["values"])
        return {"weight": weight, "bias": packed["bias"]} if "bias" in packed else {"weight": weight}

    def run(self, inputs, packed, operation, variant):
        if variant == "slow":
            time.sleep(0.003)
        return operation.reference(inputs, self.unpack(operation, packed))


@pytest.fixture
def gathered(monkeypatch, tmp_path):
    family = Gathered()
    monkeypatch.setitem(registry.FAMILIES, family.name, family)
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path / "cache"))
    return family


@pytest.fixture
def slow_dense(monkeypatch):
    """Make PyTorch's kernels so slow that any other kernel wins."""
    dense, run = type(registry.FAMILIES["dense"]), type(registry.FAMILIES["dense"]).run

    def slowly(self, inputs, packed, operation, variant):
        time.sleep(0.002)
        return run(self, inputs, packed, operation, variant)

    monkeypatch.setattr(dense, "run", slowly)


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).eval()


def test_a_family_is_matched_planned_run_saved_and_loaded(gathered, slow_dense, tmp_path):
    model = network()
    masks, x = halve.prune(model), random(3, 16)
    fast = halve.compile(model, masks, x)
    assert fast.reason is None
    assert [entry.kernel for entry in fast.plan] == ["gathered plain", "gathered plain", "dense torch"]
    assert [entry.sparse for entry in fast.plan] == [True, True, False]
    assert [layer.held for layer in fast.layers] == [["gathered"], ["gathered"], ["dense"]]
    with torch.no_grad():
        expected = halve.apply(model, masks)(x)
    torch.testing.assert_close(fast(x), expected)
    fast.save(tmp_path / "net.compiled.safetensors")
    again = halve.load_compiled(tmp_path / "net.compiled.safetensors")
    assert torch.equal(again(x), fast(x))
    assert [layer.kernels for layer in again.layers] == [layer.kernels for layer in fast.layers]
    assert [layer.held for layer in again.layers] == [["gathered"], ["gathered"], ["dense"]]
    assert again.plan == fast.plan
    torch.testing.assert_close(torch.compile(fast, backend="aot_eager")(x), expected)


def test_a_wrong_kernel_is_not_used(gathered, slow_dense, monkeypatch):
    run = Gathered.run
    monkeypatch.setattr(Gathered, "run", lambda *arguments: run(*arguments) * 1.01)
    model = network()
    fast = halve.compile(model, halve.prune(model), random(3, 16))
    assert {entry.kernel for entry in fast.plan} <= {"dense torch"}


def test_a_new_version_is_timed_again(gathered, monkeypatch):
    model, asked = network(), []
    measure = timing_cache.TimingCache.put

    def put(self, key, times):
        asked.append(sorted(times))
        measure(self, key, times)

    monkeypatch.setattr(timing_cache.TimingCache, "put", put)
    masks, x = halve.prune(model), random(3, 16)
    halve.compile(model, masks, x)
    assert asked
    asked.clear()
    halve.compile(model, masks, x)
    assert asked == []
    monkeypatch.setattr(Gathered, "version", "2")
    halve.compile(model, masks, x)
    assert any("gathered plain 2" in names for names in asked)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cuda", torch.float16), pytest.param("cpu", torch.float32, marks=pytest.mark.cpu_kernels)],
    ids=["cuda", "cpu"],
)
def test_every_family_packs_losslessly(device, dtype):
    stem = PooledConvolution(64, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
    chained = ChainedConvolution(256, 24, "relu", 64, "relu", shortcut_channels=16)
    joined = JoinedConvolution(24, 16, (3, 3), (1, 1), (1, 1), "relu", shortcut_channels=8, shortcut_stride=(2, 2))
    operations = (
        *(
            Convolution(20, 12, (3, 2)),
            Linear(20, 12),
            Convolution(24, 16, (3, 3)),
            Linear(24, 16),
            stem,
            joined,
            chained,
        ),
        Convolution(24, 1, (3, 3), groups=24),
    )
    for family in registry.FAMILIES.values():
        if family.device_type not in (None, device):
            continue
        tried = 0
        for operation in operations:
            if not family.variants(Piece(operation, dtype, is_2_4=True), torch.device(device)):
                continue
            tried += 1
            shapes = {"weight": operation.weight_shape}
            if isinstance(operation, JoinedConvolution | ChainedConvolution):
                shapes["shortcut_weight"] = operation.shortcut.weight_shape
            if isinstance(operation, ChainedConvolution):
                shapes["next_weight"] = operation.following.weight_shape
            tensors = {name: random(*shape, seed=1).to(dtype) for name, shape in shapes.items()}
            for weight in tensors.values():
                weight[:, [place for place in (0, 2, 5, 7, 8, 9, 12, 13) if place < weight.shape[1]]] = 0
            tensors["bias"] = random(operation.rows, seed=2)
            back = family.unpack(operation, family.pack(operation, tensors))
            assert back.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(back[name], tensor), (family.name, name)
                assert back[name].dtype == tensor.dtype
        assert tried or family.name in ("pool", "cpu_pool")


def test_kernels_depend_on_device_and_dtype():
    cpu, piece = torch.device("cpu"), Piece(Convolution(8, 4, activation="relu"), torch.float16, is_2_4=True)
    assert registry.kernels_for(piece, cpu) == [registry.FALLBACK] == [Kernel("dense", "torch")]
    assert "got torch.float16" in registry.no_sparse_kernels(cpu, torch.float16)
    assert "NVIDIA" not in registry.no_sparse_kernels(cpu, torch.float16)
    assert "NVIDIA" in registry.no_sparse_kernels(torch.device("meta"), torch.float16)


def test_families_are_registered_under_their_names():
    assert all(family.name == name for name, family in registry.FAMILIES.items())
    assert all(family.version for family in registry.FAMILIES.values())
