import pytest
import torch

from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, FAMILIES
from halve.engine.layer_times import LayerTimes, time_layers
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError
from tests.engine.nets import SPARSE, sparse_layer

CPU = torch.device("cpu")
CUDNN, GEMM, OURS = Kernel("dense", "cudnn"), Kernel("dense", "gemm"), Kernel("mma", "64x64")
LAYER = sparse_layer()


def timing(times):
    return LayerTimes(LAYER, 1, "8>4", times)


def test_fastest_kernel_of_each_kind():
    found = timing({FALLBACK: 3.0, GEMM: 2.0, SPARSE: 1.5, OURS: 1.0})
    assert (found.best, found.best_dense, found.best_ours, found.best_our_dense) == (OURS, GEMM, OURS, OURS)


@pytest.mark.parametrize(("threshold", "kernel"), [(1.0, GEMM), (0.8, SPARSE), (0.6, SPARSE)])
def test_our_kernels_are_used_above_a_threshold(threshold, kernel):
    assert timing({FALLBACK: 3.0, GEMM: 2.0, SPARSE: 2.2}).ours_above(threshold) == kernel


def test_a_layer_that_our_kernels_cannot_run_uses_its_fastest_dense_kernel():
    assert timing({FALLBACK: 3.0, CUDNN: 2.0}).ours_above(0.6) == CUDNN
    assert timing({}).ours_above(1.0) == FALLBACK


def test_our_kernel_is_used_if_no_dense_kernel_had_memory():
    assert timing({SPARSE: 2.0}).ours_above(1.0) == SPARSE


def test_an_entry_has_times_of_our_dense_and_sparse_kernels():
    other = Kernel("mma_sp", "32x32k8")
    entry = timing({FALLBACK: 3.0, GEMM: 2.0, SPARSE: 1.5, other: 4.0, OURS: 2.5}).entry(GEMM, "why")
    assert (entry.time_ms, entry.dense_ms, entry.our_dense_ms, entry.sparse_ms) == (2.0, 2.0, 2.5, 1.5)
    assert not entry.sparse
    assert timing({FALLBACK: 3.0}).entry(FALLBACK, "why").sparse_ms is None
    assert timing({SPARSE: 3.0}).entry(SPARSE, "why").sparse


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("held by others"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        EngineError("no NVRTC was found"),
    ],
)
def test_only_kernels_that_failed_temporarily_are_tried_again(kernels_everywhere, monkeypatch, error):
    state, run = {"free": False}, FAMILIES["mma_sp"].run

    def fails(self, inputs, packed, operation, variant):
        if not state["free"]:
            raise error
        return run(inputs, packed, operation, variant)

    def never(self, inputs, packed, operation, variant):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(type(FAMILIES["mma_sp"]), "run", fails)
    monkeypatch.setattr(type(FAMILIES["mma"]), "run", never)
    cache, fc = TimingCache(None), sparse_layer()
    for free, expected in ((False, {FALLBACK}), (True, {FALLBACK, SPARSE})):
        state["free"] = free
        [found] = time_layers([fc], lambda: fc(torch.ones(2, 8)), cache, CPU)
        assert set(found.times) == expected
    [known] = cache.known.values()
    assert [time for name, time in known.items() if name.startswith("mma ")] == [float("inf")]


def test_a_wrong_kernel_is_never_used(kernels_everywhere, monkeypatch):
    run = FAMILIES["mma_sp"].run
    monkeypatch.setattr(type(FAMILIES["mma_sp"]), "run", lambda self, *arguments: run(*arguments) + 1)
    fc = sparse_layer()
    [found] = time_layers([fc], lambda: fc(torch.ones(2, 8)), TimingCache(None), CPU)
    assert set(found.times) == {FALLBACK, OURS}


def test_only_variants_that_a_family_finds_promising_are_timed(kernels_everywhere, monkeypatch):
    sparse = type(FAMILIES["mma_sp"])
    monkeypatch.setattr(sparse, "variants", lambda self, piece, device: ["64x64", "32x32k8", "64x32k4"])
    cache, one, x = TimingCache(None), sparse_layer(), torch.randn(3, 8)
    timed = time_layers([one], lambda: one(x), cache, CPU)[0].times
    assert {kernel.variant for kernel in timed if kernel.family == "mma_sp"} == {"64x64", "32x32k8", "64x32k4"}
    rounds = len(kernels_everywhere)
    monkeypatch.setattr(sparse, "promising", lambda self, inputs, operation, variants: variants[1:])
    fewer = time_layers([one], lambda: one(x), cache, CPU)[0].times
    assert {kernel.variant for kernel in fewer if kernel.family == "mma_sp"} == {"32x32k8", "64x32k4"}
    assert len(kernels_everywhere) == rounds  # known from before
    time_layers([one], lambda: one(x), fresh := TimingCache(None), CPU)
    assert not any("mma_sp 64x64" in name for name in kernels_everywhere[-1])
    monkeypatch.undo()
    assert fresh.known.keys() == cache.known.keys()
