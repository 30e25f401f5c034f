import json

import pytest
import torch

from halve.engine import plan
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, FAMILIES
from halve.engine.layer import Layer
from halve.engine.operations import Linear
from halve.engine.plan import Entry, LayerTimes, Plan, decide, time_layers
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError
from tests.engine.nets import SPARSE

CPU = torch.device("cpu")
CUDNN, GEMM, OURS = Kernel("dense", "cudnn"), Kernel("dense", "gemm"), Kernel("mma", "64x64")


def layer(name="fc"):
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    weight[:, ::2] = 0
    return Layer(name, Linear(4, 8), {"weight": weight})


LAYER = layer()


def timing(times):
    return LayerTimes(LAYER, 1, "8>4", times)


@pytest.fixture
def everywhere(monkeypatch):
    """Make every kernel available on a CPU in any dtype, with fake timings."""
    for name in ("mma_sp", "mma"):
        monkeypatch.setattr(type(FAMILIES[name]), "unavailable", lambda self, device, dtype: None)
        monkeypatch.setattr(
            type(FAMILIES[name]), "variants", lambda self, piece, device: ["64x64"] if piece.is_2_4 else []
        )
    asked = []

    def made_up(calls, device):
        for call in calls.values():
            call()
        asked.append(list(calls))
        return {name: float(number) for number, name in enumerate(calls)}

    monkeypatch.setattr(plan, "measure", made_up)
    return asked


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


def test_a_plan_round_trips_through_json():
    entry = Entry("a", "4>2", "dense torch", False, 0.1, None, None, 0.2, "why")
    table = Plan({1: [entry], 8: []}, {"b": "falls back to eager"})
    assert Plan.from_json(json.loads(json.dumps(table.as_json()))) == table
    assert "b: falls back to eager" in str(table)


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
def test_only_kernels_that_failed_temporarily_are_tried_again(everywhere, monkeypatch, error):
    state, run = {"free": False}, FAMILIES["mma_sp"].run

    def fails(self, inputs, packed, operation, variant):
        if not state["free"]:
            raise error
        return run(inputs, packed, operation, variant)

    def never(self, inputs, packed, operation, variant):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(type(FAMILIES["mma_sp"]), "run", fails)
    monkeypatch.setattr(type(FAMILIES["mma"]), "run", never)
    cache, fc = TimingCache(None), layer()
    for free, expected in ((False, {FALLBACK}), (True, {FALLBACK, SPARSE})):
        state["free"] = free
        [found] = time_layers([fc], lambda: fc(torch.ones(2, 8)), cache, CPU)
        assert set(found.times) == expected
    [known] = cache.known.values()
    assert [time for name, time in known.items() if name.startswith("mma ")] == [float("inf")]


def test_a_wrong_kernel_is_never_used(everywhere, monkeypatch):
    run = FAMILIES["mma_sp"].run
    monkeypatch.setattr(type(FAMILIES["mma_sp"]), "run", lambda self, *arguments: run(*arguments) + 1)
    fc = layer()
    [found] = time_layers([fc], lambda: fc(torch.ones(2, 8)), TimingCache(None), CPU)
    assert set(found.times) == {FALLBACK, OURS}


def test_a_layer_with_empty_inputs_is_not_planned(everywhere):
    heads = [layer("a"), layer("b")]
    empty, some = torch.zeros(0, 8), torch.zeros(3, 8)  # no boxes were found in the example
    entries = decide(heads, lambda: (heads[0](empty), heads[1](some)), TimingCache(None), CPU)
    assert [entry.layer for entry in entries] == ["b"]
    assert heads[0](empty).shape == (0, 4)
    assert heads[0](some).shape == (3, 4)


def test_a_network_is_timed_once_and_sparse_false_uses_only_library_kernels(everywhere):
    fc, cache = layer(), TimingCache(None)
    run = lambda: fc(torch.ones(2, 8))  # noqa: E731
    assert decide([fc], run, cache, CPU, key="net", sparse=False) == []  # on a CPU there is one library kernel
    [entry] = decide([fc], run, cache, CPU, key="net")
    assert any("mma_sp 64x64" in calls for calls in everywhere)
    before = len(everywhere)
    assert decide([fc], run, cache, CPU, key="net") == [entry]
    assert len(everywhere) == before


GPU, FAST, OTHER = torch.device("cuda", 0), Kernel("mma", "32x32"), Kernel("mma", "128x64")


def in_network(monkeypatch, network_ms):
    """Three layers, and what was timed. The network takes as long as a function of their kernels says."""
    layers, asked = [layer("a"), layer("b"), layer("c")], []

    def made_up(calls, device):
        asked.append(list(calls))
        times = {}
        for name, call in calls.items():
            call()
            times[name] = network_ms([one.kernels[2] for one in layers])
        return times

    monkeypatch.setattr(plan, "measure", made_up)
    times = {FALLBACK: 9.0, FAST: 2.0, OTHER: 2.2}
    return [LayerTimes(one, 2, shape, times) for one, shape in zip(layers, ("one", "one", "other"), strict=True)], asked


def test_equal_layers_get_another_kernel_together_where_the_network_is_faster_with_it(monkeypatch):
    timed, asked = in_network(monkeypatch, lambda used: 10.0 - used[:2].count(OTHER) + 5 * used[2:].count(OTHER))
    cache = TimingCache(None)
    for _ in range(2):  # the second time, everything is known
        found = plan._in_context([FAST, FAST, FAST], timed, lambda: None, cache, GPU, "net")
        assert found == [OTHER, OTHER, FAST]
    assert [len(calls) for calls in asked] == [3, 3]  # the equal layers, the other one, as chosen; then the best of it


def test_of_kernels_that_are_faster_one_by_one_but_not_together_the_best_one_is_taken(monkeypatch):
    timed, _ = in_network(monkeypatch, lambda used: (10.0, 8.0, 9.0, 11.0)[used.count(OTHER)])
    found = plan._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None)
    assert found == [FAST, FAST, OTHER]


def decide_on_a_gpu(monkeypatch, timed):
    """Decide as on a GPU, with these times of layers."""
    monkeypatch.setattr(plan, "_candidates", lambda *arguments: [FALLBACK, FAST])
    monkeypatch.setattr(plan, "time_layers", lambda *arguments: timed)
    return decide([one.layer for one in timed], lambda: None, TimingCache(None), GPU)


def test_on_a_gpu_the_kernels_with_which_the_network_is_faster_are_used(monkeypatch):
    timed, asked = in_network(monkeypatch, lambda used: 10.0 - used.count(FAST) - 2 * used[:2].count(OTHER))
    entries = decide_on_a_gpu(monkeypatch, timed)
    assert [len(calls) for calls in asked] == [2, 3, 3]  # dense or not, one by one, together
    assert [one.layer.kernels for one in timed] == [{2: OTHER}, {2: OTHER}, {2: FAST}]
    assert [entry.kernel for entry in entries] == [str(OTHER), str(OTHER), str(FAST)]
    assert [entry.reason for entry in entries] == ["the network is faster with this kernel"] * 2 + ["fastest"]


def test_packed_tensors_of_other_input_sizes_stay_in_place(monkeypatch):
    timed, asked = in_network(monkeypatch, lambda used: 10.0 - used.count(FAST) - 2 * used[:2].count(OTHER))
    for one in timed:
        one.layer.use({1: SPARSE})
    kept = [one.layer.packed(SPARSE.family) for one in timed]
    decide_on_a_gpu(monkeypatch, timed)
    assert len(asked) == 3
    assert [one.layer.kernels for one in timed] == [{1: SPARSE, 2: OTHER}, {1: SPARSE, 2: OTHER}, {1: SPARSE, 2: FAST}]
    for one, tensors in zip(timed, kept, strict=True):
        assert one.layer.held == ["mma_sp", "mma"]
        assert all(one.layer.packed(SPARSE.family)[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])
def test_trials_that_do_not_fit_into_memory_leave_the_plan_as_it_is(monkeypatch, error):
    timed, _ = in_network(monkeypatch, lambda used: 10.0 - used.count(FAST))
    for one in timed:
        one.layer.use({1: SPARSE})
    times = plan.measure

    def full(calls, device):
        found = times(calls, device)
        if "chosen" in calls:
            raise error
        return found

    monkeypatch.setattr(plan, "measure", full)
    assert plan._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None) == [FAST] * 3
    assert all(one.layer.kernels == {1: SPARSE} for one in timed)
    decide_on_a_gpu(monkeypatch, timed)
    assert all(one.layer.kernels == {1: SPARSE, 2: FAST} for one in timed)
    assert all(one.layer.held == ["mma_sp", "mma"] for one in timed)


def test_trials_that_fail_for_another_reason_fail(monkeypatch):
    timed, _ = in_network(monkeypatch, lambda used: 10.0)

    def broken(calls, device):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(plan, "measure", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        plan._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None)
    assert all(one.layer.kernels == {} for one in timed)


def test_what_is_hardly_faster_in_the_network_is_not_taken(monkeypatch):
    timed, asked = in_network(monkeypatch, lambda used: 10.0 - 0.01 * used.count(OTHER))
    assert plan._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None) == [FAST] * 3
    assert len(asked) == 1


def test_only_near_kernels_of_ours_and_layers_that_count_are_tried_in_the_network():
    layers = [layer("a"), layer("b")]
    times = {FALLBACK: 1.0, FAST: 1.0, OTHER: 1.2, OURS: 1.3}
    timed = [LayerTimes(layers[0], 2, "large", times), LayerTimes(layers[1], 2, "small", {FAST: 0.01, OTHER: 0.01})]
    assert plan._others([FAST, FAST], timed) == {((0,), OTHER): [OTHER, FAST]}
    assert plan._others([FALLBACK, FAST], timed) == {
        ((0,), FAST): [FAST, FAST],
        ((0,), OTHER): [OTHER, FAST],
    }


def test_on_a_cpu_nothing_more_is_tried_in_the_network(everywhere, monkeypatch):
    monkeypatch.setattr(plan, "_in_context", lambda *arguments: pytest.fail("tried"))
    fc = layer()
    decide([fc], lambda: fc(torch.ones(2, 8)), TimingCache(None), CPU)
    assert everywhere == [["dense torch", "mma_sp 64x64", "mma 64x64"], ["dense"]]


def test_different_networks_do_not_share_timings(everywhere):
    fc, cache = layer(), TimingCache(None)
    run = lambda: fc(torch.ones(2, 8))  # noqa: E731
    decide([fc], run, cache, CPU, key="one network")
    before = len(everywhere)
    decide([fc], run, cache, CPU, key="another")
    assert len(everywhere) == before + 1  # the network again, the layer not
    decide([fc], run, cache, CPU, key=None)
    assert len(everywhere) == before + 2


def test_planning_keeps_only_the_packed_tensors_of_the_chosen_kernels(everywhere):
    fc = layer()
    [entry] = decide([fc], lambda: fc(torch.ones(2, 8)), TimingCache(None), CPU)
    assert fc.held == [kernel.family for kernel in fc.kernels.values()]
    assert entry.kernel == str(fc.kernel_for(2))


def test_only_variants_that_a_family_finds_promising_are_timed(everywhere, monkeypatch):
    sparse = type(FAMILIES["mma_sp"])
    monkeypatch.setattr(sparse, "variants", lambda self, piece, device: ["64x64", "32x32k8", "64x32k4"])
    cache, one, x = TimingCache(None), layer(), torch.randn(3, 8)
    timed = time_layers([one], lambda: one(x), cache, CPU)[0].times
    assert {kernel.variant for kernel in timed if kernel.family == "mma_sp"} == {"64x64", "32x32k8", "64x32k4"}
    rounds = len(everywhere)
    monkeypatch.setattr(sparse, "promising", lambda self, inputs, operation, variants: variants[1:])
    fewer = time_layers([one], lambda: one(x), cache, CPU)[0].times
    assert {kernel.variant for kernel in fewer if kernel.family == "mma_sp"} == {"32x32k8", "64x32k4"}
    assert len(everywhere) == rounds  # known from before
    time_layers([one], lambda: one(x), fresh := TimingCache(None), CPU)
    assert not any("mma_sp 64x64" in name for name in everywhere[-1])
    monkeypatch.undo()
    assert fresh.known.keys() == cache.known.keys()
