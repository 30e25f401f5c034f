"""Interleaved timing of several calls, so that clock changes and other load affect all of them equally."""

import itertools
import random
import time
from collections.abc import Callable, Mapping

import torch

from halve.batches import Progress, tracked
from halve.bench.energy import Meter

Call = Callable[[], object]
BurstTimer = Callable[[Call, int], list[float]]  # (call, count) -> milliseconds of each call

MAX_ROUNDS, MIN_ROUNDS = 10, 3
_MAX_BURST = 500  # calls
_MIN_WINDOW = 0.5  # seconds to measure energy over: the counter updates only ten to fifty times per second


def burst_timer(device: torch.device) -> BurstTimer:
    """A function that times consecutive calls: with CUDA events on a GPU, without synchronizing in between."""
    return _on_gpu if device.type == "cuda" else _on_cpu


def _on_gpu(call: Call, count: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [float(before.elapsed_time(after)) for before, after in itertools.pairwise(events)]


def _on_cpu(call: Call, count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def interleaved(
    calls: Mapping[str, Call],
    burst: BurstTimer,
    *,
    seconds: float,
    progress: Progress | None = None,
    what: str = "timing",
) -> tuple[dict[str, list[list[float]]], dict[str, Exception]]:
    """Time all calls in interleaved rounds; returns the milliseconds of each round, and the errors of failed calls.

    Every call gets about `seconds` in total. The first call of a burst is not counted: it runs on cold caches and an
    idle GPU. Rounds are in random order, since a call that draws more power slows down the one after it.

    >>> times, failed = interleaved({"short": lambda: None, "wrong": lambda: 1 / 0}, _on_cpu, seconds=0.01)
    >>> list(times), failed
    (['short'], {'wrong': ZeroDivisionError('division by zero')})
    """
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}
    estimates: dict[str, float] = {}  # milliseconds
    for name, call in calls.items():
        try:
            estimates[name] = max(min(burst(call, 2)), 1e-4)
        except Exception as error:
            failed[name] = error
    slowest = max(estimates.values(), default=1.0)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(1e3 * seconds / slowest)))
    counts = {name: max(1, min(_MAX_BURST, round(1e3 * seconds / rounds / ms))) for name, ms in estimates.items()}
    generator = random.Random(0)
    for _ in tracked(range(rounds), progress, what):
        for name in generator.sample(list(counts), len(counts)):
            if name in failed:
                continue
            count = counts[name]
            try:
                times[name].append(burst(calls[name], count + 1)[1:] if count > 1 else burst(calls[name], 1))
            except Exception as error:
                failed[name] = error
    return {name: found for name, found in times.items() if name not in failed}, failed


def energy_mj(call: Call, burst: BurstTimer, meter: Meter, ms: float, window: float = _MIN_WINDOW) -> float | None:
    """Millijoules per call, or None if the counter does not update.

    Measured from one counter update to another, at least `window` seconds apart. `ms` is about how long a call takes.
    """
    count = max(1, min(_MAX_BURST, round(10 / ms)))
    marks: list[tuple[float, int, int]] = []  # (seconds, calls, millijoules) at each counter update
    calls, last, started = 0, meter(), time.perf_counter()
    while True:
        burst(call, count)
        calls += count
        now, used = time.perf_counter(), meter()
        if used != last:
            marks.append((now, calls, used))
            last = used
        if len(marks) > 1 and marks[-1][0] - marks[0][0] >= window:
            return (marks[-1][2] - marks[0][2]) / (marks[-1][1] - marks[0][1])
        if now - started > 4 * window + 4e-3 * ms * count:
            return None
