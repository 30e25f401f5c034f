"""What changes along a run: temperature, noise, guidance and learning rate."""

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from halve.learn.settings import Settings

SETTLED = 0.8  # share of a run after which noise and guidance keep their final values
# Below this many steps masks are far from what learning could give: with each doubling the KL divergence from the dense
# network still falls by a quarter to a half. A logit moves by at most the learning rate in a step, and alpha has to be
# made up for, which takes 8.0 / 0.07 = 114 steps by default.
USEFUL_STEPS = 100
_FEW_STEPS = 2_000  # below this many, less noise gives better masks; above, full noise is as good or better
_NOISE, _LESS_NOISE = (1.0, 0.0), (0.3, 0.0)

Number = TypeVar("Number", float, Tensor)


class StepValues(NamedTuple, Generic[Number]):
    """The scheduled values of one step: floats, or tensors that a recorded step reads."""

    temperature: Number
    noise: Number
    guidance: Number  # weight of features and scores relative to probabilities
    lr: float


@dataclass(frozen=True)
class Schedule:
    """The values that `settings` prescribe along a run. `fraction` is the share of the budget spent so far.

    `steps` is the number of steps that the run is expected to take; None while that is not known.

    >>> Schedule(Settings(temperature=(4.0, 1.0))).temperature(0.5)
    2.0
    >>> [round(Schedule(Settings(), steps=5_000).noise(fraction), 2) for fraction in (0.0, 0.4, 0.8, 1.0)]
    [1.0, 0.5, 0.0, 0.0]
    >>> Schedule(Settings(), steps=500).noises
    (0.3, 0.0)
    """

    settings: Settings
    steps: int | None = None

    def at(self, fraction: float, epoch: int) -> StepValues[float]:
        """All values for a step."""
        return StepValues(
            self.temperature(fraction), self.noise(fraction), self.guidance(fraction), self.lr(fraction, epoch)
        )

    def temperature(self, fraction: float) -> float:
        """Temperature of the Gumbel-Softmax: geometric from start to end."""
        first, last = self.settings.temperatures
        return float(first * (last / first) ** fraction)

    @property
    def noises(self) -> tuple[float, float]:
        """Scale of the Gumbel noise at the start and at the end."""
        few = self.steps is not None and self.steps < _FEW_STEPS
        return self.settings.noises or (_LESS_NOISE if few else _NOISE)

    def noise(self, fraction: float) -> float:
        """Scale of the Gumbel noise: linear from start to end, which it reaches at 80 % of the run."""
        first, last = self.noises
        return first + (last - first) * min(fraction / SETTLED, 1.0)

    def guidance(self, fraction: float) -> float:
        """Weight of features and scores: from 1 to 0, which it reaches at 80 % of the run."""
        return 1 - min(fraction / SETTLED, 1.0)

    def lr(self, fraction: float, epoch: int) -> float:
        """Learning rate."""
        settings = self.settings
        if settings.schedule == "cosine":
            return settings.lr * 0.5 * (1 + math.cos(math.pi * fraction))
        return settings.lr * 0.1 ** (epoch // 3) if settings.schedule == "paper" else settings.lr
