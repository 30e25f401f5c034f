import time

import torch

from halve.bench.rounds import FEWEST, ROUNDS, burst_on, energy_mj, in_turns


def test_systems_are_called_in_turns_in_changing_orders():
    calls, counted = [], []

    def burst(call, count):
        call()
        counted.append(count)
        return [1.0] * count

    names = ("first", "second", "third")
    times, failed = in_turns({n: lambda n=n: calls.append(n) for n in names}, burst, seconds=0.05)
    rounds = [tuple(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert len(rounds) == 1 + ROUNDS
    assert {frozenset(one) for one in rounds} == {frozenset(names)}
    assert len(set(rounds)) > 2  # nobody always follows the same other
    assert not failed
    assert all(len(found) == ROUNDS * 5 for found in times.values())
    assert set(counted[3:]) == {6}  # one before those that count


def test_what_takes_long_is_called_a_few_times_only():
    times, _ = in_turns({"slow": lambda: None, "quick": lambda: None}, lambda _, count: [4000.0] * count, seconds=0.5)
    assert {name: len(found) for name, found in times.items()} == {"slow": FEWEST, "quick": FEWEST}


def test_what_fails_in_the_middle_leaves_the_others_in_their_turns():
    state = {"left": 4}

    def wears_out():
        state["left"] -= 1
        if not state["left"]:
            raise RuntimeError("out of memory")

    burst = lambda call, count: (call(), [1.0] * count)[1]  # noqa: E731
    times, failed = in_turns({"wears out": wears_out, "goes on": lambda: None}, burst, seconds=0.01)
    assert list(times) == ["goes on"]
    assert str(failed["wears out"]) == "out of memory"


def test_energy_is_counted_between_two_moments_at_which_the_counter_moved():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.001)

    def meter():  # 3 mJ a call, told after every twenty
        return 5 + 60 * (len(calls) // 20)

    assert energy_mj(call, burst_on(torch.device("cpu")), meter, 1.0, window=0.05) == 3
    assert energy_mj(call, burst_on(torch.device("cpu")), lambda: 7, 1.0, window=0.01) is None
