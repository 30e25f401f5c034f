"""Times of several calls, taken in turns: a change of the clock or a busy neighbour meets all of them alike."""

import itertools
import random
import time
from collections.abc import Callable, Mapping

import torch

from halve.batches import Progress
from halve.bench.energy import Meter

Call = Callable[[], object]
Burst = Callable[[Call, int], list[float]]  # (call, how often) -> milliseconds of each

ROUNDS, FEWEST = 10, 3
_MOST = 500  # calls in one burst
_WINDOW = 0.5  # seconds over which energy is counted at least: the counter moves ten to fifty times in one


def burst_on(device: torch.device) -> Burst:
    """How calls are timed there: by events on a GPU, which does not wait between calls; by the clock on a CPU."""
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


def in_turns(
    calls: Mapping[str, Call], burst: Burst, *, seconds: float, progress: Progress | None = None, what: str = "timing"
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Milliseconds of each call, from rounds over all of them with about `seconds` for each; and those that failed.

    The first call of each burst is not counted: it finds the caches as another system left them, and a GPU idle. Each
    round has another order: what one system makes of the clock is met by the next.

    >>> times, failed = in_turns({"short": lambda: None, "wrong": lambda: 1 / 0}, _on_cpu, seconds=0.01)
    >>> list(times), failed
    (['short'], {'wrong': ZeroDivisionError('division by zero')})
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}
    takes: dict[str, float] = {}
    for name, call in calls.items():
        try:
            takes[name] = max(min(burst(call, 2)), 1e-4)
        except Exception as error:
            failed[name] = error
    slowest = max(takes.values(), default=1.0)
    rounds = max(FEWEST, min(ROUNDS, int(1e3 * seconds / slowest)))
    counts = {name: max(1, min(_MOST, round(1e3 * seconds / rounds / ms))) for name, ms in takes.items()}
    orders = random.Random(0)
    for _ in progress(range(rounds), what) if progress else range(rounds):
        for name in orders.sample(list(counts), len(counts)):
            if name in failed:
                continue
            count = counts[name]
            try:
                times[name] += burst(calls[name], count + 1)[1:] if count > 1 else burst(calls[name], 1)
            except Exception as error:
                failed[name] = error
    return {name: found for name, found in times.items() if name not in failed}, failed


def energy_mj(call: Call, burst: Burst, meter: Meter, ms: float, window: float = _WINDOW) -> float | None:
    """Millijoules of one call that takes about `ms`, between two moments at which the counter moved.

    None where it does not move.
    """
    count = max(1, min(_MOST, round(10 / ms)))
    marks: list[tuple[float, int, int]] = []  # seconds, calls, millijoules, whenever the counter has moved
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
