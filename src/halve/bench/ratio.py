"""How much faster one system is than another, with an interval: both were timed in the same rounds."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from halve.errors import OptionError

# Quantiles of Student's t at 97.5 % for 1 to 9 degrees of freedom: an interval of 95 % from 2 to 10 rounds.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Ratio(NamedTuple):
    """A ratio of times, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


def paired_ratio(slower_ms: Sequence[float], faster_ms: Sequence[float]) -> Ratio:
    """The geometric mean of the ratios of rounds, with its 95 % interval (Student's t on their logarithms).

    Clock changes and other load affect all systems in a round alike, so ratios of rounds vary less than times do.

    Args:
        slower_ms: milliseconds of the reference in each round, from `Measurement.round_ms`.
        faster_ms: milliseconds of the other system in the same rounds.

    >>> print(paired_ratio([2.0, 2.2, 2.1], [1.0, 1.1, 1.04]))
    2.01x (1.98 to 2.03)
    """
    if len(slower_ms) != len(faster_ms) or not 2 <= len(slower_ms) <= len(_T) + 1:
        raise OptionError(
            f"both systems must have the same 2 to {len(_T) + 1} rounds, got {len(slower_ms)} and {len(faster_ms)}"
        )
    logs = [math.log(one / other) for one, other in zip(slower_ms, faster_ms, strict=True)]
    mean = statistics.mean(logs)
    margin = _T[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin))
