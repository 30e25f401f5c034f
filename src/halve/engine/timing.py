"""How long something takes on a GPU: several ways side by side, in CUDA graphs, so that starting them costs nothing."""

import statistics
from collections.abc import Callable, Mapping

import torch

_TARGET_MS, _MOST = 0.3, 40  # how long a graph should run, and how many repetitions it holds at most


def graph_times(ways: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """The median milliseconds of each way, taken in turns, so that a change of the clock meets all of them."""
    graphs = {name: _repeated(call) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (graph, repetitions) in graphs.items():
            times[name].append(elapsed_ms(graph.replay) / repetitions)
    return {name: statistics.median(found) for name, found in times.items()}


def elapsed_ms(call: Callable[[], object]) -> float:
    """Milliseconds on the current stream until everything that the call started is done."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def record(call: Callable[[], object], repetitions: int = 1) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph, after it ran on a stream of its own as recording wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(repetitions):
            call()
    return graph


def _repeated(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    call()
    call()
    once = record(call)
    elapsed_ms(once.replay)
    taken = min(elapsed_ms(once.replay) for _ in range(3))
    repetitions = max(1, min(_MOST, round(_TARGET_MS / max(taken, 1e-3))))
    graph = once if repetitions == 1 else record(call, repetitions)
    elapsed_ms(graph.replay)
    return graph, repetitions
