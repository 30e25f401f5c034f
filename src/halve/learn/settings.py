"""The settings of a learning run: defaults, presets, schedules. What is here, and the data, decide the outcome."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from halve.errors import ModelError, listed
from halve.learn.objective import Match, Objective
from halve.learn.sampling import Final
from halve.learn.schedule import Pace
from halve.masks.mask import MaskSet
from halve.prune.score import ScoreFunction
from halve.select.select import SelectOptions

DEFAULT_MINUTES = 2.0
SETTLED = 0.8  # share of a run after which noise and guidance stay at their last values


class LearnOptions(SelectOptions, total=False):
    """The options of `learn`: those of `select`, and the fields of `Settings`."""

    objective: str | Objective
    match: Match
    features: str | Sequence[str] | None
    start: str | ScoreFunction | MaskSet
    alpha: float
    temperature: float | tuple[float, float]
    noise: float | tuple[float, float]
    hard: bool
    final: Final
    augment: bool
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    schedule: Literal["cosine", "constant", "paper"]
    steps: int | None
    epochs: float | None
    minutes: float | None
    accumulate: int
    seed: int


@dataclass(frozen=True)
class Settings:
    """All that decides a run but model, selection and data."""

    objective: str | Objective = "distill"
    match: Match = "all"
    features: tuple[str, ...] | None = None
    start: str | ScoreFunction | MaskSet = "magnitude"
    alpha: float = 8.0
    temperature: float | tuple[float, float] = 1.0
    noise: float | tuple[float, float] = (1.0, 0.0)
    hard: bool = True
    final: Final = "argmax"
    augment: bool = True
    lr: float = 0.07
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    schedule: Literal["cosine", "constant", "paper"] = "cosine"
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        budgets = [name for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise ModelError(f"give one budget, not {' and '.join(budgets)}")
        numbers = ("alpha", "lr", "weight_decay", "accumulate", *budgets)
        if bad := [name for name in numbers if not _is_number(getattr(self, name))]:
            raise ModelError(f"{listed(bad)} must be finite numbers")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**62:
            raise ModelError(f"seed={self.seed!r}: a whole number from 0 up to 2**62")
        positive = [*budgets, "accumulate", "lr"]
        if bad := [name for name in positive if not getattr(self, name) > 0]:
            raise ModelError(f"{listed(bad)} must be positive")
        if bad := [name for name in ("alpha", "weight_decay") if not getattr(self, name) >= 0]:
            raise ModelError(f"{listed(bad)} must not be negative")
        if bad := [
            name for name in ("steps", "accumulate") if getattr(self, name) not in (None, int(getattr(self, name) or 0))
        ]:
            raise ModelError(f"{listed(bad)} must be whole numbers")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ModelError(f"betas={self.betas}: two numbers from 0 up to, but not including, 1")
        fine = all(_is_number(value) and value > 0 for value in self.temperatures)
        if len(self.temperatures) != 2 or not fine:
            raise ModelError(
                f"temperature {self.temperature}: a positive number, or one for the start and one for the end"
            )
        noises = self.noises
        if len(noises) != 2 or not all(_is_number(value) and value >= 0 for value in noises):
            raise ModelError(f"noise {self.noise}: 0 or more, or one number for the start and one for the end")
        choices = {"schedule": ("cosine", "constant", "paper"), "final": ("argmax", "sample")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ModelError(f"{name}={getattr(self, name)!r}: there are {listed(allowed)}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Settings":
        """From keyword arguments; unknown ones are named."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(options.keys() - known):
            raise ModelError(f"learn has no option {listed(unknown)}; there are {listed(sorted(known), most=99)}")
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
        }
        if isinstance(plain.get("features"), str):
            plain["features"] = (plain["features"],)
        return cls(**plain)

    @property
    def temperatures(self) -> tuple[float, float]:
        """At the start and at the end."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature, self.temperature)

    def temperature_at(self, fraction: float) -> float:
        """Geometric between start and end.

        >>> Settings(temperature=(4.0, 1.0)).temperature_at(0.5)
        2.0
        """
        first, last = self.temperatures
        return float(first * (last / first) ** fraction)

    @property
    def noises(self) -> tuple[float, float]:
        """Scale of the Gumbel noise at the start and at the end."""
        return self.noise if isinstance(self.noise, tuple) else (self.noise, self.noise)

    def noise_at(self, fraction: float) -> float:
        """Linear from start to end, which is reached at four fifths of the run.

        >>> [round(Settings().noise_at(fraction), 2) for fraction in (0.0, 0.4, 0.8, 1.0)]
        [1.0, 0.5, 0.0, 0.0]
        """
        first, last = self.noises
        return first + (last - first) * min(fraction / SETTLED, 1.0)

    @property
    def budget_minutes(self) -> float | None:
        """Minutes that the run may take; None where steps or epochs are counted instead."""
        return self.minutes or (DEFAULT_MINUTES if self.steps is None and self.epochs is None else None)

    def pace_at(self, fraction: float, epoch: int) -> Pace[float]:
        """What changes along the run."""
        guidance = 1 - min(fraction / SETTLED, 1.0)
        return Pace(self.temperature_at(fraction), self.noise_at(fraction), guidance, self.lr_at(fraction, epoch))

    def lr_at(self, fraction: float, epoch: int) -> float:
        """The learning rate after this fraction of the run, in this epoch."""
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * fraction))
        return self.lr * 0.1 ** (epoch // 3) if self.schedule == "paper" else self.lr

    def described(self) -> dict[str, Any]:
        """As plain JSON values, for recipes and checkpoints."""
        result = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if callable(self.objective):
            result["objective"] = getattr(self.objective, "__name__", "function")
        if isinstance(self.start, MaskSet):
            codes = b"".join(mask.stored_codes.numpy().tobytes() for mask in self.start.values())
            result["start"] = f"masks {hashlib.sha256(codes).hexdigest()[:16]}"
        elif callable(self.start):
            result["start"] = getattr(self.start, "__name__", "function")
        return {key: list(value) if isinstance(value, tuple) else value for key, value in result.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def preset_options(name: str | None) -> dict[str, Any]:
    """The options of `learn` that a preset stands for.

    "paper" is the recipe of the paper's text on everything that it masks; BatchNorm stays frozen, which in its
    published code it does not.
    """
    if name is None:
        return {}
    if name != "paper":
        raise ModelError(f"unknown preset {name!r}; there is 'paper'")
    return {
        "order": "flat",
        "remainder": "pad",
        "kinds": ("conv",),
        "objective": "task",
        "start": "glorot",
        "temperature": 0.1,
        "noise": 1.0,
        "final": "sample",
        "augment": False,
        "lr": 1.0,
        "betas": (0.9, 0.999),
        "weight_decay": 1e-4,
        "schedule": "paper",
    }


def split_options(options: Mapping[str, Any]) -> tuple[SelectOptions, dict[str, Any]]:
    """Keyword arguments of `learn` -> options of `select`, settings."""
    where = {key: value for key, value in options.items() if key in SelectOptions.__annotations__}
    how = {key: value for key, value in options.items() if key not in where}
    return cast(SelectOptions, where), how
