"""When to search for channel orders, for how long, and where to take known ones from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from halve.errors import MaskError
from halve.masks.layout import unpermuted
from halve.masks.mask import MaskSet
from halve.permute.permute import SECONDS, Permutation, check_seconds, check_summary
from halve.select.select import Choice

_DEFAULT_SHARE = 0.25  # of a run's minutes
_DEFAULT_SECONDS = 30.0  # in a run that is measured in steps, for a search that was not asked for
_SECONDS_PER_STEP = 0.25  # at most, in such a run: two steps are a try, and should not wait


def search_by_default(start: Any, preset: str | None, choices: Sequence[Choice]) -> bool:
    """Whether to search for channel orders if the user did not say.

    Not with a preset, which is someone else's recipe; not with blocks in flat order, which do not run along channels;
    and not without a score to search by.
    """
    along_channels = all(choice.layout is not None and choice.layout.order == "channels" for choice in choices)
    has_score = not isinstance(start, MaskSet) and start != "glorot"
    return preset is None and along_channels and has_score


def search_seconds(given: float | None, asked: bool, minutes: float | None, steps: int | None = None) -> float:
    """The time limit of a search.

    Args:
        given: What the user passed as `permute_seconds`, if anything.
        asked: Whether the user asked for the search.
        minutes: The time budget of the run; None if it is measured in steps.
        steps: The steps of the run, if they are counted.

    >>> search_seconds(None, True, 2.0), search_seconds(None, True, None), search_seconds(None, False, None)
    (30.0, 120.0, 30.0)
    >>> search_seconds(None, False, None, steps=2)
    0.5
    """
    if given is not None:
        return check_seconds(given)
    if minutes is not None:
        return min(SECONDS, 60 * minutes * _DEFAULT_SHARE)
    if asked:
        return SECONDS
    return _DEFAULT_SECONDS if steps is None else min(_DEFAULT_SECONDS, steps * _SECONDS_PER_STEP)


def orders_of(masks: MaskSet, choices: Sequence[Choice]) -> Permutation | None:
    """The channel orders of existing masks, for the choices they fit; None if they have none."""
    if not any(mask.layout.channel_order for mask in masks.values()):
        return None
    layouts = {name: mask.layout for name, mask in masks.items()}
    result = [
        dataclasses.replace(choice, layout=layouts[choice.name])
        if choice.name in layouts and unpermuted(layouts[choice.name]) == choice.layout
        else choice
        for choice in choices
    ]
    summary: dict[str, Any] = masks.recipe.get("permute") or {}
    try:
        check_summary(summary)
    except MaskError:  # a recipe may hold anything
        summary = {}
    return Permutation(tuple(result), masks.moves, summary)
