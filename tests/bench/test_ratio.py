import math
import random

import pytest

from halve.bench.ratio import paired_ratio
from halve.errors import OptionError


def test_changes_that_affect_both_systems_cancel():
    clock = [1.0, 1.7, 1.2, 2.4, 1.1]
    ratio = paired_ratio([3 * slow for slow in clock], [2 * slow for slow in clock])
    assert ratio == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    chance = random.Random(0)
    covered = 0
    for _ in range(2000):
        slower = [1.3 * math.exp(chance.gauss(0, 0.05)) for _ in range(10)]
        faster = [math.exp(chance.gauss(0, 0.05)) for _ in range(10)]
        ratio = paired_ratio(slower, faster)
        covered += ratio.low <= 1.3 <= ratio.high
    assert 0.935 < covered / 2000 < 0.965


@pytest.mark.parametrize(("slower", "faster"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0] * 11, [1.0] * 11)])
def test_rounds_must_be_paired(slower, faster):
    with pytest.raises(OptionError, match="same 2 to 10 rounds"):
        paired_ratio(slower, faster)
