import json

import pytest
import torch

from halve.engine import plan
from halve.engine.geometry import Geometry
from halve.engine.layer import Layer
from halve.engine.plan import Entry, Plan, Timed, decide, entry_of, timed
from halve.engine.timing_cache import Memory
from halve.errors import EngineError

LAYER = Layer("fc", Geometry(4, 8), torch.randn(4, 8), None, linear=True)


def timing(**times):
    return Timed(LAYER, 1, "8>4", "key", {name.replace("_", " "): time for name, time in times.items()})


def test_the_fastest_of_each_kind():
    found = timing(torch=3.0, gemm=2.0, sparse_64x64=1.5, twin_64x64=1.0)
    assert (found.best("dense"), found.best("ours"), found.best("any")) == ("gemm", "twin 64x64", "twin 64x64")


@pytest.mark.parametrize(("bar", "way"), [(1.0, "gemm"), (0.8, "sparse 64x64"), (0.6, "sparse 64x64")])
def test_our_kernels_are_taken_above_a_bar(bar, way):
    assert timing(torch=3.0, gemm=2.0, sparse_64x64=2.2).above(bar) == way


def test_a_layer_that_our_kernels_cannot_run_takes_its_fastest_dense_way():
    assert timing(torch=3.0, cudnn=2.0).above(0.6) == "cudnn"
    assert timing().above(1.0) == "torch"


def test_our_kernel_is_taken_where_no_dense_way_had_memory():
    assert timing(sparse_64x64=2.0).above(1.0) == "sparse 64x64"


def test_a_plan_is_written_and_read():
    table = Plan({1: [Entry("a", "4>2", "torch", 0.1, None, None, 0.2, "why")], 8: []}, {"b": "left"})
    assert Plan.from_json(json.loads(json.dumps(table.as_json()))) == table
    assert "b: as it was (left)" in str(table)


def test_a_line_says_what_our_kernels_take_with_all_and_half_weights():
    entry = entry_of(timing(torch=3.0, gemm=2.0, sparse_64x64=1.5, sparse_16x32=4.0, twin_64x64=2.5), "gemm", "why")
    assert (entry.time_ms, entry.dense_ms, entry.twin_ms, entry.sparse_ms) == (2.0, 2.0, 2.5, 1.5)
    assert entry_of(timing(torch=3.0), "torch", "why").sparse_ms is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("held by others"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        EngineError("no NVRTC was found"),
    ],
)
def test_a_way_that_fails_for_a_reason_that_passes_is_tried_again_and_no_other(monkeypatch, error):
    state = {"free": False}

    class Crowded(Layer):
        def possible(self, twins=True):
            return ["torch", "gemm", "sparse 64x64"]

        def hold(self, ways):
            pass

        def run(self, x, residual, way):
            if way == "gemm":
                raise RuntimeError("no kernel")
            if way.startswith("sparse") and not state["free"]:
                raise error
            return super().run(x, residual, "torch")

    monkeypatch.setattr(plan, "graph_times", lambda calls: dict.fromkeys(calls, 1.0))
    layer = Crowded("fc", Geometry(4, 8), torch.randn(4, 8), None, linear=True)
    memory = Memory(None)
    for free, expected in ((False, {"torch": 1.0}), (True, {"torch": 1.0, "sparse 64x64": 1.0})):
        state["free"] = free
        [found] = timed([layer], lambda: layer(torch.randn(2, 8)), memory)
        assert found.times == expected
    assert memory.recall(next(iter(memory.known)), ["gemm"]) == {"gemm": float("inf")}


def test_a_layer_that_gets_nothing_is_not_planned(monkeypatch):
    monkeypatch.setattr(plan, "graph_times", lambda calls: dict.fromkeys(calls, 1.0))
    heads = [Layer("head", Geometry(4, 8), torch.randn(4, 8), None, linear=True) for _ in range(2)]
    empty, some = torch.zeros(0, 8), torch.zeros(3, 8)  # no boxes were found in the example
    entries = decide(heads, lambda: (heads[0](empty), heads[1](some)), Memory(None), sparse=True)
    assert len(entries) == 1
    assert heads[0](empty).shape == (0, 4)
    assert heads[0](some).shape == (3, 4)


def test_a_network_is_timed_once_and_without_sparse_kernels_in_dense_ways_alone(monkeypatch):
    asked = []

    def times(calls):
        asked.append(set(calls))
        return {name: float(number) for number, name in enumerate(calls)}

    monkeypatch.setattr(plan, "graph_times", times)
    layer = Layer("fc", Geometry(4, 8), torch.randn(4, 8).bfloat16(), None, linear=True)
    memory, run = Memory(None), lambda: layer(torch.randn(2, 8).bfloat16())
    [entry] = decide([layer], run, memory, sparse=False)
    assert entry.kernel == "torch"
    assert {way for calls in asked for way in calls} <= {"torch", "gemm", "dense"}
    [entry] = decide([layer], run, memory, sparse=True)
    assert any(way.startswith("twin") for calls in asked for way in calls)
    before, known = len(asked), entry
    assert decide([layer], run, memory, sparse=True) == [known]
    assert len(asked) == before
