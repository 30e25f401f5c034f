"""The settings of a learning run: defaults, checks and presets. Together with the data they decide the outcome."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from halve.errors import OptionError, listed
from halve.learn.objective import Match, Objective
from halve.learn.sampling import Final
from halve.masks.mask import MaskSet
from halve.prune.score import ScoreFunction
from halve.select.select import SelectOptions

DEFAULT_MINUTES = 2.0
LrSchedule = Literal["cosine", "constant", "paper"]
NormUse = Literal["frozen", "learn", "track"]

_BUDGETS = ("steps", "epochs", "minutes")
_POSITIVE = ("lr", "epochs", "minutes")
_POSITIVE_INTEGERS = ("steps", "accumulate")
_NOT_NEGATIVE = ("alpha", "weight_decay")


class LearnOptions(SelectOptions, total=False):
    """Keyword types of `learn`: the options of `select` and the fields of `Settings`, which a test keeps equal."""

    objective: str | Objective
    match: Match
    features: str | Sequence[str] | None
    start: str | ScoreFunction | MaskSet
    alpha: float
    temperature: float | tuple[float, float]
    noise: float | tuple[float, float] | None
    hard: bool
    final: Final
    augment: bool
    norms: NormUse
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    schedule: LrSchedule
    steps: int | None
    epochs: float | None
    minutes: float | None
    accumulate: int
    seed: int


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run besides model, selection and data. `learn` documents the fields."""

    objective: str | Objective = "distill"
    match: Match = "auto"
    features: tuple[str, ...] | None = None
    start: str | ScoreFunction | MaskSet = "magnitude"
    alpha: float = 8.0
    temperature: float | tuple[float, float] = 1.0
    noise: float | tuple[float, float] | None = None
    hard: bool = True
    final: Final = "argmax"
    augment: bool = True
    norms: NormUse = "frozen"
    lr: float = 0.07
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    schedule: LrSchedule = "cosine"
    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _BUDGETS if getattr(self, name) is not None}
        if len(given) > 1:
            raise OptionError(f"give one budget, got {' and '.join(f'{name}={given[name]!r}' for name in given)}")
        for name in _POSITIVE:
            self._require(name, lambda x: _is_number(x) and x > 0, "a positive number")
        for name in _POSITIVE_INTEGERS:
            self._require(name, lambda x: _is_number(x) and x == int(x) > 0, "a positive integer")
        for name in _NOT_NEGATIVE:
            self._require(name, lambda x: _is_number(x) and x >= 0, "a non-negative number")
        self._require("seed", lambda x: isinstance(x, int) and 0 <= x < 2**62, "an integer from 0 to 2**62 - 1")
        self._require("betas", lambda x: _is_pair(x, lambda b: 0 <= b < 1), "two numbers from 0 to below 1")
        if not _is_pair(self.temperatures, lambda x: x > 0):
            raise OptionError(
                f"temperature must be a positive number or a pair (start, end) of them, got {self.temperature!r}"
            )
        if self.noises is not None and not _is_pair(self.noises, lambda x: x >= 0):
            raise OptionError(f"noise must be a non-negative number or a pair (start, end) of them, got {self.noise!r}")
        self._require(
            "features",
            lambda x: x is None or (isinstance(x, tuple) and x and all(isinstance(glob, str) for glob in x)),
            "one or more names or globs of modules, or None for the repeated blocks",
        )
        self._require("augment", lambda x: isinstance(x, bool), "True or False")
        self._require("hard", lambda x: isinstance(x, bool), "True or False")
        self._require("schedule", lambda x: x in get_args(LrSchedule), f"one of {listed(get_args(LrSchedule))}")
        self._require("norms", lambda x: x in get_args(NormUse), f"one of {listed(get_args(NormUse))}")
        self._require("final", lambda x: x in get_args(Final), f"one of {listed(get_args(Final))}")

    def _require(self, name: str, allowed: Any, what: str) -> None:
        value = getattr(self, name)
        if not (allowed(value) or (value is None and name in _BUDGETS)):
            raise OptionError(f"{name} must be {what}, got {value!r}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Settings":
        """Settings from keyword arguments. Lists become tuples, as JSON has no tuples."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(options.keys() - known):
            names = sorted(known | SelectOptions.__annotations__.keys())
            raise OptionError(f"learn has no option {listed(unknown)}; options are {listed(names, most=99)}")
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
        }
        if isinstance(plain.get("features"), str):
            plain["features"] = (plain["features"],)
        return cls(**plain)

    @property
    def temperatures(self) -> tuple[float, float]:
        """Temperature at the start and at the end."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature, self.temperature)

    @property
    def noises(self) -> tuple[float, float] | None:
        """Scale of the Gumbel noise at the start and at the end; None to let the number of steps decide."""
        return self.noise if self.noise is None or isinstance(self.noise, tuple) else (self.noise, self.noise)

    @property
    def budget_minutes(self) -> float | None:
        """Minutes that the run may take; None if steps or epochs are counted instead."""
        return self.minutes or (DEFAULT_MINUTES if self.steps is None and self.epochs is None else None)

    @property
    def compares_features(self) -> bool:
        """Whether the objective reads the features of blocks; a user's own objective may."""
        distilled = self.objective == "distill" and self.match in ("auto", "outputs+features", "features")
        return callable(self.objective) or distilled

    def described(self) -> dict[str, Any]:
        """The settings as plain JSON values, for recipes and run states."""
        result = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if callable(self.objective):
            result["objective"] = getattr(self.objective, "__name__", "function")
        if isinstance(self.start, MaskSet):
            codes = b"".join(mask.stored_codes.numpy().tobytes() for mask in self.start.values())
            norms = b"".join(pair.numpy().tobytes() for pair in self.start.corrections.values())
            result["start"] = f"masks {hashlib.sha256(codes + norms).hexdigest()[:16]}"
        elif callable(self.start):
            result["start"] = getattr(self.start, "__name__", "function")
        return {key: list(value) if isinstance(value, tuple) else value for key, value in result.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_pair(value: Any, allowed: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(_is_number(number) and allowed(number) for number in value)


def preset_options(name: str | None) -> dict[str, Any]:
    """The options of `learn` that a preset sets.

    "paper" is the recipe of the paper's text, on all layers that it masks. "paper-tuned" is the same at its best: with
    BatchNorm statistics that move, as in the paper's published code, temperature 1 and a cosine schedule.
    """
    if name is None:
        return {}
    if name not in ("paper", "paper-tuned"):
        raise OptionError(f"unknown preset {name!r}; presets are 'paper' and 'paper-tuned'")
    tuned = {"norms": "track", "temperature": 1.0, "schedule": "cosine", "final": "argmax"}
    return _PAPER | (tuned if name == "paper-tuned" else {})


_PAPER = {
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
    """Split the keyword arguments of `learn` into options of `select` and settings."""
    selection = {key: value for key, value in options.items() if key in SelectOptions.__annotations__}
    settings = {key: value for key, value in options.items() if key not in selection}
    return cast(SelectOptions, selection), settings
