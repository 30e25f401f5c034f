import pytest
import torch

from halve.engine import decide as of_decide
from halve.engine.decide import decide
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK
from halve.engine.layer_times import LayerTimes
from halve.engine.timing_cache import TimingCache
from tests.engine.nets import SPARSE, sparse_layer

CPU = torch.device("cpu")
GPU, FAST, OTHER = torch.device("cuda", 0), Kernel("mma", "32x32"), Kernel("mma", "128x64")
OURS = Kernel("mma", "64x64")


def test_a_layer_with_empty_inputs_is_not_planned(kernels_everywhere):
    heads = [sparse_layer("a"), sparse_layer("b")]
    empty, some = torch.zeros(0, 8), torch.zeros(3, 8)  # no boxes were found in the example
    entries = decide(heads, lambda: (heads[0](empty), heads[1](some)), TimingCache(None), CPU)
    assert [entry.layer for entry in entries] == ["b"]
    assert heads[0](empty).shape == (0, 4)
    assert heads[0](some).shape == (3, 4)


def test_a_network_is_timed_once_and_sparse_false_uses_only_library_kernels(kernels_everywhere):
    fc, cache = sparse_layer(), TimingCache(None)
    run = lambda: fc(torch.ones(2, 8))  # noqa: E731
    assert decide([fc], run, cache, CPU, key="net", sparse=False) == []  # on a CPU there is one library kernel
    [entry] = decide([fc], run, cache, CPU, key="net")
    assert any("mma_sp 64x64" in calls for calls in kernels_everywhere)
    before = len(kernels_everywhere)
    assert decide([fc], run, cache, CPU, key="net") == [entry]
    assert len(kernels_everywhere) == before


def in_network(monkeypatch, network_ms):
    """Three layers, and what was timed. The network takes as long as a function of their kernels says."""
    layers, asked = [sparse_layer("a"), sparse_layer("b"), sparse_layer("c")], []

    def made_up(calls, device):
        asked.append(list(calls))
        times = {}
        for name, call in calls.items():
            call()
            times[name] = network_ms([one.kernels[2] for one in layers])
        return times

    monkeypatch.setattr(of_decide, "measure", made_up)
    times = {FALLBACK: 9.0, FAST: 2.0, OTHER: 2.2}
    return [LayerTimes(one, 2, shape, times) for one, shape in zip(layers, ("one", "one", "other"), strict=True)], asked


def test_equal_layers_get_another_kernel_together_where_the_network_is_faster_with_it(monkeypatch):
    timed, asked = in_network(monkeypatch, lambda used: 10.0 - used[:2].count(OTHER) + 5 * used[2:].count(OTHER))
    cache = TimingCache(None)
    for _ in range(2):  # the second time, everything is known
        found = of_decide._in_context([FAST, FAST, FAST], timed, lambda: None, cache, GPU, "net")
        assert found == [OTHER, OTHER, FAST]
    assert [len(calls) for calls in asked] == [3, 3]  # the equal layers, the other one, as chosen; then the best of it


def test_of_kernels_that_are_faster_one_by_one_but_not_together_the_best_one_is_taken(monkeypatch):
    timed, _ = in_network(monkeypatch, lambda used: (10.0, 8.0, 9.0, 11.0)[used.count(OTHER)])
    found = of_decide._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None)
    assert found == [FAST, FAST, OTHER]


def decide_on_a_gpu(monkeypatch, timed):
    """Decide as on a GPU, with these times of layers."""
    monkeypatch.setattr(of_decide, "candidate_kernels", lambda *arguments: [FALLBACK, FAST])
    monkeypatch.setattr(of_decide, "time_layers", lambda *arguments: timed)
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
    times = of_decide.measure

    def full(calls, device):
        found = times(calls, device)
        if "chosen" in calls:
            raise error
        return found

    monkeypatch.setattr(of_decide, "measure", full)
    assert of_decide._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None) == [FAST] * 3
    assert all(one.layer.kernels == {1: SPARSE} for one in timed)
    decide_on_a_gpu(monkeypatch, timed)
    assert all(one.layer.kernels == {1: SPARSE, 2: FAST} for one in timed)
    assert all(one.layer.held == ["mma_sp", "mma"] for one in timed)


def test_trials_that_fail_for_another_reason_fail(monkeypatch):
    timed, _ = in_network(monkeypatch, lambda used: 10.0)

    def broken(calls, device):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(of_decide, "measure", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        of_decide._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None)
    assert all(one.layer.kernels == {} for one in timed)


def test_what_is_hardly_faster_in_the_network_is_not_taken(monkeypatch):
    timed, asked = in_network(monkeypatch, lambda used: 10.0 - 0.01 * used.count(OTHER))
    assert of_decide._in_context([FAST] * 3, timed, lambda: None, TimingCache(None), GPU, None) == [FAST] * 3
    assert len(asked) == 1


def test_only_near_kernels_of_ours_and_layers_that_count_are_tried_in_the_network():
    layers = [sparse_layer("a"), sparse_layer("b")]
    times = {FALLBACK: 1.0, FAST: 1.0, OTHER: 1.2, OURS: 1.3}
    timed = [LayerTimes(layers[0], 2, "large", times), LayerTimes(layers[1], 2, "small", {FAST: 0.01, OTHER: 0.01})]
    assert of_decide._others([FAST, FAST], timed) == {((0,), OTHER): [OTHER, FAST]}
    assert of_decide._others([FALLBACK, FAST], timed) == {
        ((0,), FAST): [FAST, FAST],
        ((0,), OTHER): [OTHER, FAST],
    }


def test_on_a_cpu_nothing_more_is_tried_in_the_network(kernels_everywhere, monkeypatch):
    monkeypatch.setattr(of_decide, "_in_context", lambda *arguments: pytest.fail("tried"))
    fc = sparse_layer()
    decide([fc], lambda: fc(torch.ones(2, 8)), TimingCache(None), CPU)
    assert kernels_everywhere == [["dense torch", "mma_sp 64x64", "mma 64x64"], ["dense"]]


def test_different_networks_do_not_share_timings(kernels_everywhere):
    fc, cache = sparse_layer(), TimingCache(None)
    run = lambda: fc(torch.ones(2, 8))  # noqa: E731
    decide([fc], run, cache, CPU, key="one network")
    before = len(kernels_everywhere)
    decide([fc], run, cache, CPU, key="another")
    assert len(kernels_everywhere) == before + 1  # the network again, the layer not
    decide([fc], run, cache, CPU, key=None)
    assert len(kernels_everywhere) == before + 2


def test_planning_keeps_only_the_packed_tensors_of_the_chosen_kernels(kernels_everywhere):
    fc = sparse_layer()
    [entry] = decide([fc], lambda: fc(torch.ones(2, 8)), TimingCache(None), CPU)
    assert fc.held == [kernel.family for kernel in fc.kernels.values()]
    assert entry.kernel == str(fc.kernel_for(2))
