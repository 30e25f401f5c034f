"""The registry of scores. A new score is a `Score` in a file of this folder, and a line in `SCORES`."""

import functools
from typing import Any

from torch import Tensor

from halve.errors import DataError, OptionError, listed
from halve.prune.elementwise import MAGNITUDE, RANDOM, WANDA
from halve.prune.reconstruct import RECONSTRUCT
from halve.prune.score import LayerScores, Score, ScoreFunction, ScoreInputs

SCORES = {score.name: score for score in (MAGNITUDE, WANDA, RECONSTRUCT, RANDOM)}


def score_of(score: str | ScoreFunction) -> Score:
    """The score of a name, or one that calls a user's function for each layer.

    >>> score_of("wanda").needs_data
    True
    >>> score_of(lambda name, weight: weight.abs()).needs_data
    False
    """
    if callable(score):
        name = getattr(score, "__name__", "function")
        return Score(name, "a user's function", functools.partial(_call, score))
    if not isinstance(score, str) or score not in SCORES:
        raise OptionError(f"unknown score {score!r}; use {listed(SCORES)}, or a function of (layer name, weight)")
    return SCORES[score]


def check_data(score: Score, data: Any) -> None:
    """Raise if the score needs data and there is none."""
    if score.needs_data and data is None:
        raise DataError(f"score {score.name!r} needs data: pass data=, batches of images")


def _call(function: ScoreFunction, inputs: ScoreInputs) -> LayerScores:
    weights = {choice.name: inputs.weights[choice.name] for choice in inputs.choices}
    return LayerScores({name: _checked(name, function(name, w.clone()), w) for name, w in weights.items()})


def _checked(name: str, result: Any, weight: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != weight.shape:
        got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise OptionError(
            f"your score function must return a tensor of shape {tuple(weight.shape)} for layer {name}, got {got}"
        )
    if result.is_complex():
        raise OptionError(f"your score function returned complex numbers for layer {name}, which cannot be ranked")
    if not bool(result.isfinite().all()):
        raise OptionError(f"your score function returned NaN or infinity for layer {name}")
    return result.detach().cpu()
