"""How far a masked network agrees with the dense one: from an evaluation, or from what the masks record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halve.binomial import interval
from halve.errors import FileError
from halve.masks.mask import MaskSet
from halve.report.files import json_of, mapping, number, words

_COUNTED = {"classification": "images", "segmentation": "pixels", "detection": "boxes"}


@dataclass(frozen=True)
class Agreed:
    """The share of predictions that are the dense network's.

    Args:
        share: From 0 to 1.
        ends: Its 95 % confidence interval; None if what is counted are not images, or if the images chose the masks.
        images: The number of images.
        counted: What has predictions: "images", "pixels" or "boxes".
        held_back: Whether the images are those that `learn` held back.
        kl: Mean KL divergence, if known.
    """

    share: float
    ends: tuple[float, float] | None
    images: int
    counted: str = "images"
    held_back: bool = False
    kl: float | None = None


def evaluation_of(given: Any) -> list[Mapping[str, Any]]:
    """Evaluations as JSON values: one, or a list of them with the names of their mask files."""
    plain = json_of(given, "a result of 'halve evaluate --json'")
    found = plain if isinstance(plain, list) else [plain]
    if not all(isinstance(one, Mapping) and number(one.get("images")) for one in found):
        raise FileError(
            f"evaluation={given!r} is not a result of 'halve evaluate --json'"
            if not hasattr(given, "__fspath__")
            else f"{given} is not a result of 'halve evaluate --json'"
        )
    return found


def agreed_in(evaluation: Mapping[str, Any]) -> Agreed | None:
    """What an evaluation says."""
    counted = _COUNTED.get(words(evaluation.get("task")) or "classification", "outputs")
    return _agreed(evaluation, counted, held_back=False)


def agreed_by_recipe(masks: MaskSet) -> Agreed | None:
    """What `learn` found on the images that it held back."""
    return _agreed(mapping(masks.recipe.get("quality")), "images", held_back=True)


def _agreed(found: Mapping[str, Any], counted: str, held_back: bool) -> Agreed | None:
    share, images = number(found.get("agreement")), number(found.get("images"))
    if share is None or images is None or not 0 <= share <= 1 or not 1 <= images < 1e12:
        return None
    ends = None
    given = found.get("agreement_interval")
    if isinstance(given, list | tuple) and len(given) == 2:
        low, high = map(number, given)
        ends = (low, high) if low is not None and high is not None else None
    if "agreement_interval" not in found and counted == "images" and images < 1e7:
        ends = interval(round(share * images), int(images))
    return Agreed(share, ends, int(images), counted, held_back, number(found.get("kl")))
