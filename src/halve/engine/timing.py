"""Interleaved timing of several calls on a device."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from halve.cuda_graphs import record
from halve.engine.turns import turn

_TARGET_MS, _MAX_REPETITIONS = 0.3, 40  # of one measurement


def measure(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of each call. Rounds are interleaved, so that clock changes affect all calls equally.

    On a GPU, calls are replayed as CUDA graphs, without launch overhead, and the median is returned. On a CPU it is the
    minimum: other processes only ever add to the time.

    >>> list(measure({"nothing": lambda: None}, torch.device("cpu")))
    ['nothing']
    """
    prepare = _on_gpu if device.type == "cuda" else _on_cpu
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    timers = {name: prepare(call, device, pool) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with turn(device):
        for _ in range(rounds):
            for name in timers:
                times[name].append(timers[name]())
    if device.type == "cuda":
        timers.clear()  # with the last recording, their memory can be returned
        torch.cuda.empty_cache()
    summary = statistics.median if device.type == "cuda" else min
    return {name: summary(found) for name, found in times.items()}


def _on_cpu(call: Callable[[], object], device: torch.device, pool: Any) -> Callable[[], float]:
    def once(repetitions: int) -> float:
        started = time.perf_counter()
        for _ in range(repetitions):
            call()
        return 1e3 * (time.perf_counter() - started) / repetitions

    call()
    repetitions = _repetitions(once(1))
    return lambda: once(repetitions)


def _on_gpu(call: Callable[[], object], device: torch.device, pool: Any) -> Callable[[], float]:
    """Record the call, repeated if it is short. All recordings share memory: nobody reads what they write.

    How often is decided by the time of a plain call, which is longer than that of a recorded one: four times as many
    repetitions make up for it. Where launching takes more time than that, the recording is replayed several times.
    """
    call()
    repetitions = _repetitions(min(elapsed_ms(call) for _ in range(2)) / 4)

    def run() -> None:
        for _ in range(repetitions):
            call()

    graph = None
    with contextlib.suppress(torch.OutOfMemoryError):
        graph = record(run, device, warmups=0, pool=pool, free_memory=False)[0]
    if graph is None:  # the failed recording is gone by now, so that its memory can be returned, too
        graph = record(run, device, warmups=0, pool=pool)[0]
    elapsed_ms(graph.replay)
    replays = _repetitions(elapsed_ms(graph.replay))

    def replay() -> None:
        for _ in range(replays):
            graph.replay()

    return lambda: elapsed_ms(replay) / (replays * repetitions)


def _repetitions(ms: float) -> int:
    return max(1, min(_MAX_REPETITIONS, round(_TARGET_MS / max(ms, 1e-3))))


def elapsed_ms(call: Callable[[], object]) -> float:
    """GPU milliseconds of a call on the current stream, including all work that it launches."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def ran_out_of_memory(error: Exception) -> bool:
    """Whether a call may succeed with more free memory. Libraries name the status instead of raising PyTorch's error.

    >>> ran_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> ran_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> ran_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in ("ALLOC", "out of memory"))
