"""Exact bounds on a share from counts: what `same` of `images` says about all images of the same kind.

`lower` is the one-sided bound of Clopper and Pearson: the largest share p for which `same` or more successes have a
probability of at most delta. `anytime_lower` holds at every number of images at once, so that counting may stop when
the result is good enough. Every bound is found by bisection, and the end that is returned was verified.
"""

import math
from collections.abc import Callable

import numpy as np

_SLACK = 1e-6  # probabilities are rounded up by this factor, far more than their rounding errors
_STEPS = 60  # of bisection
_PRIOR = 0.5  # Beta(1/2, 1/2): the bet of the anytime bound


def lower(same: int, images: int, delta: float) -> float:
    """A share that the true one exceeds, with confidence 1 - delta.

    >>> f"{lower(688, 688, 0.001):.4f}", f"{lower(9400, 10000, 0.001):.4f}", lower(0, 10, 0.001)
    ('0.9900', '0.9323', 0.0)
    """
    _check(same, images, delta)
    if same == 0:
        return 0.0
    j = np.arange(same, images, dtype=np.float64)
    ratios = np.concatenate([[0.0], np.cumsum(np.log((images - j) / (j + 1)))])  # log C(n, j) / C(n, same)
    steps = np.arange(len(ratios), dtype=np.float64)
    choices = math.lgamma(images + 1) - math.lgamma(same + 1) - math.lgamma(images - same + 1)

    def excluded(share: float) -> bool:
        """Whether `same` or more have a probability of at most delta."""
        one, other = math.log(share), math.log1p(-share)
        terms = ratios + steps * (one - other)
        largest = float(terms.max())
        tail = largest + math.log(float(np.exp(terms - largest).sum()))
        return choices + same * one + (images - same) * other + tail + _SLACK <= math.log(delta)

    return _last(excluded, same / images)


def upper(same: int, images: int, delta: float) -> float:
    """A share that the true one stays below, with confidence 1 - delta.

    >>> upper(10, 10, 0.001), f"{upper(9400, 10000, 0.001):.4f}"
    (1.0, '0.9471')
    """
    return 1.0 if same == images else math.nextafter(1.0 - lower(images - same, images, delta), 2.0)


def interval(same: int, images: int, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided confidence interval of Clopper and Pearson.

    >>> ["%.4f" % end for end in interval(94, 100)]
    ['0.8740', '0.9777']
    """
    delta = (1 - confidence) / 2
    return lower(same, images, delta), upper(same, images, delta)


def anytime_lower(same: int, images: int, delta: float) -> float:
    """Like `lower`, but valid for all numbers of images at once: look at any time, and stop whenever you like.

    For the true share p, the mixture of likelihood ratios B(same + 1/2, flips + 1/2) / (B(1/2, 1/2) p^same
    (1 - p)^flips) is a martingale with mean 1, so that it ever reaches 1 / delta with probability at most delta
    (Ville's inequality).

    >>> anytime_lower(2000, 2000, 0.001) > 0.994, anytime_lower(0, 5, 0.001)
    (True, 0.0)
    """
    _check(same, images, delta)
    if same == 0:
        return 0.0
    flips = images - same
    evidence = _log_beta(same + _PRIOR, flips + _PRIOR) - _log_beta(_PRIOR, _PRIOR)

    def excluded(share: float) -> bool:
        return evidence - same * math.log(share) - flips * math.log1p(-share) - _SLACK >= -math.log(delta)

    return _last(excluded, same / images)


def anytime_upper(same: int, images: int, delta: float) -> float:
    """Like `upper`, but valid for all numbers of images at once."""
    return 1.0 if same == images else math.nextafter(1.0 - anytime_lower(images - same, images, delta), 2.0)


def images_needed(
    share: float,
    delta: float,
    agreement: float = 1.0,
    most: int = 10**8,
    bound: Callable[[int, int, float], float] = lower,
) -> int | None:
    """How many images prove a share, if they agree as often as expected; None if no number up to `most` does.

    >>> images_needed(0.99, 0.001), images_needed(0.999, 0.001), images_needed(0.9, 0.001, agreement=0.9)
    (688, 6905, None)
    """
    if agreement <= share:
        return None

    def enough(images: int) -> bool:
        return bound(math.floor(agreement * images + 1e-9), images, delta) >= share

    high = max(1, math.ceil(math.log(delta) / math.log(share))) if 0 < share < 1 else 1
    while not enough(high):
        high *= 2
        if high > most:
            return None
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def difference_lower(only_first: int, only_second: int, images: int, delta: float, anytime: bool = False) -> float:
    """A bound on how much larger the first of two shares is, both counted on the same images.

    Only images on which the two differ say anything: their number bounds how often they differ, and how they are
    divided bounds the direction, each with confidence 1 - delta / 2. The difference of two separate bounds is far
    weaker.

    Args:
        only_first: Images that count for the first share alone.
        only_second: Images that count for the second share alone.
        images: All images.
        delta: The probability that the bound is wrong, at most.
        anytime: Whether the bound holds for all numbers of images at once. Default: for one that was fixed before.

    >>> difference_lower(60, 30, 3000, 0.05) > 0 > difference_lower(33, 30, 3000, 0.05)
    True
    """
    below, above = (anytime_lower, anytime_upper) if anytime else (lower, upper)
    differ = only_first + only_second
    direction = 2 * (below(only_first, differ, delta / 2) if differ else 0.0) - 1  # from -1 to 1
    often = (below if direction > 0 else above)(differ, images, delta / 2)
    return direction * often


def _check(same: int, images: int, delta: float) -> None:
    if not (0 <= same <= images and images > 0 and 0 < delta < 1):
        raise ValueError(f"counts must be 0 <= same <= images > 0, and delta in 0..1; got {same}, {images}, {delta}")


def _last(excluded: Callable[[float], bool], high: float) -> float:
    """The largest share found that is excluded; all below it are, and `high` is not."""
    low, high = 0.0, min(high, 1 - 2.0**-53)
    if excluded(high):  # only where all agree and delta is no small number
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
