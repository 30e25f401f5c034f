"""Channel orders before masks are chosen: by which score they are searched, for how long, and when nobody asked."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from halve.batches import Forward, Progress, images_of, to_device
from halve.errors import HalveError, ModelError
from halve.masks.layout import plain
from halve.masks.mask import MaskSet
from halve.permute.permute import SECONDS, Permutation, permute
from halve.select.select import Choice

_SHARE = 0.25  # of a run's minutes that a search may take that nobody asked for
_UNASKED = 30.0  # seconds that it may take where the run is measured in steps

Score = str | Callable[[str, Tensor], Tensor]


def graded_by(score: Score) -> Score:
    """The score that orders are searched by: one that grades each weight on its own."""
    return {"reconstruct": "wanda", "glorot": "magnitude"}.get(score, score) if isinstance(score, str) else score


def reordered(
    model: nn.Module,
    choices: Sequence[Choice],
    score: Score,
    found: Mapping[str, Tensor],
    example: Any,
    seconds: float,
    *,
    seed: int = 0,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> Permutation:
    """Channel orders in which the layers keep more of what was found for them by a score."""
    example = to_device(example if forward is not None else images_of(example), model)
    if score == "wanda":  # a layer's output loses its squares; magnitudes, on images held back, do better as they are
        found = {name: value.square() for name, value in found.items()}
    return permute(model, choices, found, example, forward=forward, seconds=seconds, seed=seed, progress=progress)


def seconds_for(given: float | None, asked: bool, minutes: float | None) -> float:
    """How long to search, at most. `minutes` is the run's budget, None where it is measured in steps.

    >>> seconds_for(None, True, 2.0), seconds_for(None, False, 2.0), seconds_for(None, False, None)
    (120.0, 30.0, 30.0)
    """
    if given is None:
        unasked = _UNASKED if minutes is None else 60 * minutes * _SHARE
        return SECONDS if asked else min(SECONDS, unasked)
    if not isinstance(given, int | float) or not given >= 0:
        raise ModelError(f"permute_seconds={given!r}: a number of seconds, 0 or more")
    return given


def welcome(start: Any, preset: str | None, choices: Sequence[Choice]) -> bool:
    """Whether orders are looked for where nobody said so: not in the recipes of others, nor where they cannot help."""
    along_channels = all(choice.layout is not None and choice.layout.order == "channels" for choice in choices)
    by_a_score = not isinstance(start, MaskSet) and start != "glorot"
    return preset is None and along_channels and by_a_score


def why_not(error: Exception) -> str:
    """In one line, why a network keeps its order."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, HalveError) else f"{type(error).__name__}: {first[:160]}"


def orders_of(start: MaskSet, choices: Sequence[Choice]) -> Permutation | None:
    """The channel orders of masks to start from, if they have any."""
    if not any(mask.layout.channel_order for mask in start.values()):
        return None
    layouts = {name: mask.layout for name, mask in start.items()}
    result = [
        dataclasses.replace(choice, layout=layouts[choice.name])
        if choice.name in layouts and plain(layouts[choice.name]) == choice.layout
        else choice
        for choice in choices
    ]
    return Permutation(tuple(result), start.moves, start.recipe.get("permute") or {})
