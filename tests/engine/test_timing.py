import contextlib
import time
import weakref

import pytest
import torch

from halve.engine import timing
from halve.engine.timing import measure, ran_out_of_memory

CPU = torch.device("cpu")


def test_a_slow_call_takes_as_long_as_it_takes_and_a_quick_one_less():
    found = measure({"slow": lambda: time.sleep(0.01), "quick": lambda: None}, CPU, rounds=3)
    assert list(found) == ["slow", "quick"]
    assert found["slow"] >= 10
    assert found["quick"] < found["slow"]


def test_calls_take_turns_and_slow_ones_are_not_repeated():
    seen = []

    def call(name):
        def run():
            seen.append(name)
            time.sleep(0.001)  # longer than one measurement should take

        return run

    measure({name: call(name) for name in "ab"}, CPU, rounds=3)
    assert "".join(seen) == "aabb" + "ab" * 3  # first each on its own, to see how long it takes


def test_quick_calls_are_repeated_within_bounds():
    count = 0

    def call():
        nonlocal count
        count += 1

    measure({"quick": call}, CPU, rounds=3)
    assert 2 + 3 < count <= 2 + 3 * 40


class Gpu:
    """What `measure` needs of a GPU, with a clock. A recording takes as long as all that is called in it."""

    def __init__(self, launch_ms, monkeypatch):
        self.launch_ms, self.now, self.capturing, self.records = launch_ms, 0.0, False, []
        self.graphs, self.alive_when_emptied, self.out_of_memory = weakref.WeakSet(), [], 0
        monkeypatch.setattr(timing, "record", self.record)
        monkeypatch.setattr(timing, "elapsed_ms", self.elapsed_ms)
        monkeypatch.setattr(timing, "turn", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.alive_when_emptied.append(len(self.graphs)))

    def kernel(self, ms):
        def call():
            self.now += ms if self.capturing else max(ms, self.launch_ms)

        return call

    def elapsed_ms(self, call):
        before = self.now
        call()
        return self.now - before

    def record(self, run, device, *, warmups, pool=None, free_memory=True):
        graph = Graph()
        self.records.append((pool, free_memory, len(self.graphs)))
        self.graphs.add(graph)
        if self.out_of_memory:
            self.out_of_memory -= 1
            raise torch.OutOfMemoryError
        self.capturing, before = True, self.now
        run()
        self.capturing, graph.ms = False, self.now - before

        def replay():
            self.now += graph_of().ms

        graph_of, graph.replay = weakref.ref(graph), replay
        return graph, None


class Graph:
    pass


@pytest.mark.parametrize("launch_ms", [0.0, 0.05, 2.0])
def test_recordings_are_long_enough_to_be_timed(launch_ms, monkeypatch):
    gpu, measured = Gpu(launch_ms, monkeypatch), []
    timed = gpu.elapsed_ms
    monkeypatch.setattr(timing, "elapsed_ms", lambda call: measured.append(timed(call)) or measured[-1])
    times = measure({"short": gpu.kernel(0.08), "long": gpu.kernel(0.5)}, torch.device("cuda"))
    assert times == pytest.approx({"short": 0.08, "long": 0.5})
    assert min(measured[-10:]) > 0.2  # five rounds of both
    assert len(gpu.records) == 2


def test_no_recording_is_left_when_their_memory_is_returned(monkeypatch):
    gpu = Gpu(0.0, monkeypatch)
    measure({"one": gpu.kernel(1.0), "two": gpu.kernel(1.0)}, torch.device("cuda"))
    assert gpu.alive_when_emptied == [0]


def test_without_memory_for_a_recording_it_is_made_again_once_that_is_freed(monkeypatch):
    gpu = Gpu(0.0, monkeypatch)
    gpu.out_of_memory = 1
    assert measure({"one": gpu.kernel(1.0), "two": gpu.kernel(2.0)}, torch.device("cuda")) == {"one": 1.0, "two": 2.0}
    assert gpu.records == [("pool", False, 0), ("pool", True, 0), ("pool", False, 1)]
    gpu.out_of_memory = 2
    with pytest.raises(torch.OutOfMemoryError):
        measure({"one": gpu.kernel(1.0)}, torch.device("cuda"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("no kernel"), False),
        (ValueError("wrong shape"), False),
    ],
)
def test_libraries_run_out_of_memory_too(error, expected):
    assert ran_out_of_memory(error) == expected
