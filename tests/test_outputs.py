import math
from collections import namedtuple

import pytest
import torch

from halve.outputs import relative_error

Pair = namedtuple("Pair", "a b")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([-INF, 1.0], [INF, 1.0], INF),
        ([1.0, 1.0], [INF, 1.0], INF),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-9, 0.0], [0.0, 0.0], INF),
    ],
)
def test_the_largest_difference_counts(got, expected, error):
    assert relative_error(torch.tensor(got), torch.tensor(expected)) == pytest.approx(error)


def test_integers_booleans_and_complex_numbers_are_compared():
    assert relative_error(torch.tensor([2, 3]), torch.tensor([2, 4])) == 0.25
    assert relative_error(torch.tensor([True]), torch.tensor([False])) == INF
    assert relative_error(torch.tensor([1 + 1j]), torch.tensor([1 + 1j])) == 0.0
    assert relative_error(torch.tensor([1 + 1j]), torch.tensor([1.0])) == INF


def test_structures_are_compared():
    x = torch.ones(2)
    assert relative_error(Pair(x, "a"), Pair(x, "a")) == 0.0
    assert relative_error(Pair(x, "a"), Pair(x, "b")) == INF
    assert relative_error([x, None], [x, None]) == 0.0
    assert relative_error([x], (x,)) == INF
    assert relative_error({"a": x}, {"b": x}) == INF
    assert relative_error(x, torch.ones(2, 1)) == INF
    assert relative_error(x, 1.0) == INF
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0


def test_half_precision_does_not_overflow():
    big = torch.full((4,), 60000.0, dtype=torch.float16)
    assert relative_error(-big, big) == pytest.approx(2.0)
    assert math.isfinite(relative_error(big, big))
