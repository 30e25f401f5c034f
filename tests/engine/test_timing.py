import time

import torch

from halve.engine.timing import measure

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
