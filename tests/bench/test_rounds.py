import time

import torch

from halve.bench.rounds import MAX_ROUNDS, MIN_ROUNDS, burst_timer, energy_mj, interleaved


def test_calls_are_interleaved_in_random_order():
    calls, counted = [], []

    def burst(call, count):
        call()
        counted.append(count)
        return [1.0] * count

    names = ("first", "second", "third")
    times, failed = interleaved({n: lambda n=n: calls.append(n) for n in names}, burst, seconds=0.05)
    rounds = [tuple(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert len(rounds) == 1 + MAX_ROUNDS
    assert {frozenset(one) for one in rounds} == {frozenset(names)}
    assert len(set(rounds)) > 2  # no call always follows the same other call
    assert not failed
    assert all([len(one) for one in found] == [5] * MAX_ROUNDS for found in times.values())
    assert set(counted[3:]) == {6}  # one is not counted


def test_slow_calls_run_only_a_few_times():
    times, _ = interleaved(
        {"slow": lambda: None, "quick": lambda: None}, lambda _, count: [4000.0] * count, seconds=0.5
    )
    assert {name: len(found) for name, found in times.items()} == {"slow": MIN_ROUNDS, "quick": MIN_ROUNDS}


def test_a_call_that_fails_midway_does_not_stop_the_others():
    state = {"left": 4}

    def fails_later():
        state["left"] -= 1
        if not state["left"]:
            raise RuntimeError("out of memory")

    burst = lambda call, count: (call(), [1.0] * count)[1]  # noqa: E731
    times, failed = interleaved({"fails later": fails_later, "works": lambda: None}, burst, seconds=0.01)
    assert list(times) == ["works"]
    assert str(failed["fails later"]) == "out of memory"


def test_energy_is_measured_between_counter_updates():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.001)

    def meter():  # 3 mJ per call, updated every twenty calls
        return 5 + 60 * (len(calls) // 20)

    assert energy_mj(call, burst_timer(torch.device("cpu")), meter, 1.0, window=0.05) == 3
    assert energy_mj(call, burst_timer(torch.device("cpu")), lambda: 7, 1.0, window=0.01) is None
