import numpy as np
import pytest

from halve.export.calibration import LEVELS, METHODS, Histogram


def filled(values, parts=4):
    histogram = Histogram()
    for part in np.array_split(values, parts):
        histogram.add(part)
    return histogram


@pytest.mark.parametrize("percent", [50, 90, 99.9])
def test_percentiles_are_those_of_the_values(percent):
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    found = filled(values).limit(f"percentile {percent}")
    assert found == pytest.approx(np.percentile(np.abs(values), percent), rel=0.03)


def test_the_mse_limit_is_near_the_best_one():
    values = np.random.default_rng(0).laplace(size=200_000)
    errors = {}
    for limit in np.linspace(1, 14, 100):
        step = limit / LEVELS
        errors[limit] = np.square(np.clip(np.rint(values / step), -LEVELS, LEVELS) * step - values).mean()
    found = filled(values).limit("mse")
    step = found / LEVELS
    error = np.square(np.clip(np.rint(values / step), -LEVELS, LEVELS) * step - values).mean()
    assert error < 1.03 * min(errors.values())


def test_an_outlier_is_cut_off_but_no_limit_exceeds_the_largest_value():
    values = np.append(np.random.default_rng(0).uniform(size=100_000), 1e4)
    histogram = filled(values)
    assert histogram.largest == 1e4
    assert histogram.limit("percentile 99.9") < 1.1
    small = filled(np.array([0.3, 0.3]))
    assert all(small.limit(method) == 0.3 for method in METHODS)


def test_zeros_count_and_nothing_else_is_needed():
    assert filled(np.zeros(10)).limit("mse") == 0
    assert filled(np.array([0.0] * 9 + [1.0])).limit("percentile 50") < 1e-9


def test_large_tensors_are_sampled_but_their_largest_value_is_known():
    values = np.zeros(1 << 20, np.float32)
    values[12345] = 7
    assert filled(values, 1).largest == 7
