import math
import random
from fractions import Fraction

import pytest
from scipy.stats import beta

from halve.binomial import (
    anytime_lower,
    anytime_upper,
    difference_lower,
    images_needed,
    interval,
    lower,
    upper,
)


def tail(same, images, share):
    """The probability of `same` or more of `images`, in exact arithmetic."""
    p = Fraction(share)
    return sum(math.comb(images, j) * p**j * (1 - p) ** (images - j) for j in range(same, images + 1))


@pytest.mark.parametrize("delta", [0.5, 0.05, 0.001, 1e-9])
def test_the_bound_is_the_one_of_clopper_and_pearson_and_never_above_it(delta):
    rng = random.Random(0)
    cases = [(n, rng.randint(1, n)) for n in [1, 2, 3, 10, 100, 5000, 100_000] for _ in range(8)] + [
        (7, 7),
        (7400, 7400),
    ]
    for images, same in cases:
        exact = float(beta.ppf(delta, same, images - same + 1))
        assert exact * (1 - 1e-5) - 1e-15 <= lower(same, images, delta) <= exact * (1 + 1e-12)


def test_the_bound_holds_in_exact_arithmetic():
    for images in range(1, 25):
        for same in range(1, images + 1):
            assert tail(same, images, lower(same, images, 0.01)) <= Fraction(1, 100)
            assert 1 - tail(same, images, upper(same - 1, images, 0.01)) <= Fraction(1, 100)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    for share in (0.5, 0.9, 0.99):
        images = 40
        covered = sum(
            math.comb(images, k) * share**k * (1 - share) ** (images - k)
            for k in range(images + 1)
            if interval(k, images)[0] <= share <= interval(k, images)[1]
        )
        assert covered >= 0.95


def test_nothing_and_everything():
    assert (lower(0, 5, 0.1), upper(5, 5, 0.1), anytime_lower(0, 5, 0.1), anytime_upper(5, 5, 0.1)) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("same", "images", "delta"), [(3, 2, 0.1), (-1, 2, 0.1), (0, 0, 0.1), (1, 2, 0.0), (1, 2, 1.0)]
)
def test_impossible_counts_are_refused(same, images, delta):
    with pytest.raises(ValueError, match="counts must be"):
        lower(same, images, delta)


def test_stopping_when_the_anytime_bound_excludes_the_truth_succeeds_less_often_than_delta():
    """The probability that the bound is ever wrong within 300 images, computed exactly over all paths."""
    share, delta = 0.9, 0.1
    paths, wrong = {0: 1.0}, 0.0
    for images in range(1, 301):
        following: dict[int, float] = {}
        for same, probability in paths.items():
            for more, chance in ((1, share), (0, 1 - share)):
                following[same + more] = following.get(same + more, 0.0) + probability * chance
        excluded = [k for k in following if anytime_lower(k, images, delta) > share]
        wrong += sum(following.pop(k) for k in excluded)
        paths = {k: p for k, p in following.items() if p > 1e-15}
    assert 0 < wrong <= delta


def test_the_anytime_bound_costs_little():
    for same, images in ((10, 10), (688, 688), (9400, 10_000)):
        assert anytime_lower(same, images, 0.001) < lower(same, images, 0.001)
    assert lower(9400, 10_000, 0.001) - anytime_lower(9400, 10_000, 0.001) < 0.005


def test_the_number_of_images_is_enough_and_one_less_is_not():
    for share, agreement in ((0.99, 1.0), (0.999, 1.0), (0.9, 0.95)):
        images = images_needed(share, 0.001, agreement)
        assert lower(math.floor(agreement * images + 1e-9), images, 0.001) >= share
    assert lower(images_needed(0.99, 0.001) - 1, images_needed(0.99, 0.001) - 1, 0.001) < 0.99
    assert images_needed(0.95, 0.001, agreement=0.95) is None
    assert images_needed(0.9499999, 0.001, agreement=0.95, most=1000) is None


def test_a_paired_comparison_is_tighter_than_two_bounds():
    n, first, second = 10_000, 130, 60
    both = 9400
    apart = lower(both + first, n, 0.0005) - upper(both + second, n, 0.0005)
    paired = difference_lower(first, second, n, 0.001)
    assert apart < 0 < paired < (first - second) / n
    assert difference_lower(0, 0, n, 0.001) < 0


def test_the_paired_bound_is_wrong_less_often_than_delta():
    n, p, q, delta = 30, 0.2, 0.1, 0.1
    wrong = 0.0
    for first in range(n + 1):
        for second in range(n + 1 - first):
            rest = n - first - second
            ways = math.comb(n, first) * math.comb(n - first, second)
            probability = ways * p**first * q**second * (1 - p - q) ** rest
            wrong += probability * (difference_lower(first, second, n, delta) > p - q)
    assert wrong <= delta
