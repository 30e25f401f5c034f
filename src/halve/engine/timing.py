"""Interleaved timing of several calls on a device."""

import statistics
import time
from collections.abc import Callable, Mapping

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
    timers = {name: (_on_gpu if device.type == "cuda" else _on_cpu)(call, device) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with turn(device):
        for _ in range(rounds):
            for name, timer in timers.items():
                times[name].append(timer())
    summary = statistics.median if device.type == "cuda" else min
    return {name: summary(found) for name, found in times.items()}


def _on_cpu(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    def once(repetitions: int) -> float:
        started = time.perf_counter()
        for _ in range(repetitions):
            call()
        return 1e3 * (time.perf_counter() - started) / repetitions

    call()
    repetitions = _repetitions(once(1))
    return lambda: once(repetitions)


def _on_gpu(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    def repeated(repetitions: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(repetitions):
                call()

        return record(run, device)[0].replay

    call()
    once = repeated(1)
    elapsed_ms(once)
    repetitions = _repetitions(min(elapsed_ms(once) for _ in range(3)))
    replay = once if repetitions == 1 else repeated(repetitions)
    elapsed_ms(replay)
    return lambda: elapsed_ms(replay) / repetitions


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
