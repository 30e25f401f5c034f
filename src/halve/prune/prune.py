"""Masks from one-shot scores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress, iterate
from halve.errors import DataError, ModelError, listed
from halve.masks.mask import Mask, MaskSet
from halve.masks.recipe import origin_of, with_fingerprint
from halve.modules import weight_of
from halve.permute.permute import SECONDS
from halve.permute.policy import graded_by, reordered
from halve.prune import scores
from halve.prune.recalibrate import recalibrate as recalibrate_masks
from halve.prune.reconstruct import reconstruct
from halve.prune.statistics import input_squares
from halve.select.select import Choice, Selection, SelectOptions, plain_options, select

ScoreFunction = Callable[[str, Tensor], Tensor]


def prune(
    model: nn.Module,
    score: str | ScoreFunction = "magnitude",
    data: Any = None,
    *,
    recalibrate: bool = False,
    permute: bool = False,
    permute_seconds: float = SECONDS,
    example: Any = None,
    seed: int = 0,
    forward: Forward | None = None,
    progress: Progress | None = None,
    **selection: Unpack[SelectOptions],
) -> MaskSet:
    """Choose masks at once, by a score: in each block the N weights with the highest score are kept.

    - `score`: "magnitude", or with `data` "wanda" (magnitude times input norm) or "reconstruct" (what changes each
      layer's outputs least), or "random" (by `seed`), or a function of (layer name, weight) that gives scores of the
      weight's shape.
    - `data`: batches to measure inputs on, no labels needed; a DataLoader, a list, or one tensor of images.
    - `recalibrate`: also measure BatchNorm statistics on `data` with the masks on; they travel with the masks.
      "reconstruct" then chooses masks that are better with such statistics and worse without.
    - `permute`: look for channel orders in which blocks keep more of the score, for at most `permute_seconds`. The
      network's structure is captured on an `example` (a batch of images of any content; the first of `data` if there is
      one). Masks still refer to the checkpoint as it is; `apply(permute=True)` moves the channels.
    - the rest are the options of `select`: pattern, include, exclude, also, order, remainder, kinds.

    The model stays as it is. `halve.apply(model, masks)` gives a masked copy.

    >>> import halve
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
    >>> halve.prune(model, pattern="1:4")
    MaskSet(1 layer, 288 weights, 25.0 % kept)
    """
    check_score(score, data)
    if recalibrate and data is None:
        raise DataError("recalibration needs data: pass data=batches of images")
    chosen = select(model, **selection)
    check_something_masked(chosen)
    weights = {choice.name: finite_weight(choice.name, model) for choice in chosen.masked}
    data = list(data) if permute and isinstance(data, Iterator) else data  # it is run over more than once
    choices: Sequence[Choice] = chosen.masked
    permutation, found, images = None, None, 0

    def scored(by: str | ScoreFunction) -> tuple[dict[str, Tensor], int]:
        return score_layers(
            model,
            choices,
            weights,
            by,
            data,
            recalibrated=recalibrate,
            seed=seed,
            forward=forward,
            progress=progress,
        )

    if permute:
        if example is None and data is not None:
            example = next(iterate(data))
        if example is None:
            raise DataError(
                "permute=True needs an example to capture the network on: pass example= a batch of images, "
                "of any content"
            )
        by = graded_by(score)
        found, images = scored(by)
        permutation = reordered(
            model, choices, by, found, example, permute_seconds, seed=seed, forward=forward, progress=progress
        )
        choices = permutation.choices
    if found is None or graded_by(score) != score:
        found, images = scored(score)
    recipe = {
        "method": "prune",
        "score": score if isinstance(score, str) else getattr(score, "__name__", "function"),
        "images": images,
        "seed": seed,
        "selection": plain_options(selection),
        "permute": None if permutation is None else permutation.summary,
    }
    track = progress or (lambda items, _: items)
    masks = {}
    for choice in track(choices, "layers"):
        assert choice.pattern is not None
        assert choice.layout is not None
        mask = Mask.from_scores(choice.pattern, choice.layout, found.pop(choice.name))
        masks[choice.name] = with_fingerprint(mask, weights[choice.name], choice.shared_with)
    result = MaskSet(masks, recipe=recipe | origin_of(model), moves=permutation.moves if permutation else None)
    return recalibrate_masks(model, result, data, forward=forward, progress=progress) if recalibrate else result


def check_score(score: str | ScoreFunction, data: Any) -> None:
    """Raise for a score that does not exist, or that needs data where there is none."""
    if callable(score):
        return
    if not isinstance(score, str) or score not in scores.SCORES:
        raise ModelError(f"unknown score {score!r}; there are {listed(scores.SCORES)}, or pass a function")
    if data is None and score in scores.NEEDS_DATA:
        raise DataError(f"score {score!r} needs data: pass data=batches of images")


def score_layers(
    model: nn.Module,
    choices: Sequence[Choice],
    weights: Mapping[str, Tensor],
    score: str | ScoreFunction,
    data: Any = None,
    *,
    recalibrated: bool = False,
    seed: int = 0,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """Scores of the weights' shapes by layer name, and how many images they were measured on.

    `recalibrated` says that BatchNorm statistics will be measured with the masks on.
    """
    seen: dict[str, Tensor] = {}
    images = 0
    if score == "reconstruct":
        options: dict[str, Any] = {"seed": seed, "forward": forward, "progress": progress}
        return reconstruct(model, choices, weights, data, recalibrated=recalibrated, **options)
    if score == "wanda":
        seen, images = input_squares(model, choices, data, forward, progress)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in (choice.name for choice in choices):
        weight = weights[name]
        if callable(score):
            found[name] = _checked(name, score(name, weight.clone()), weight)
        elif score == "random":
            found[name] = scores.random(weight, generator)
        elif score == "wanda" and name in seen:
            found[name] = scores.wanda(weight, seen.pop(name))
        else:  # also a layer that the data never reached
            found[name] = scores.magnitude(weight)
    return found, images


def check_something_masked(chosen: Selection) -> None:
    """Raise where no layer is left to mask, with the reasons."""
    if not chosen.masked:
        reasons = listed([f"{choice.name}: {choice.reason}" for choice in chosen], most=5) or "the model has no layers"
        raise ModelError(f"nothing to mask; {reasons}")


def finite_weight(name: str, model: nn.Module) -> Tensor:
    """A layer's weight; raises where it holds NaN or infinity."""
    weight = weight_of(model.get_submodule(name))
    if not bool(weight.isfinite().all()):
        count = int((~weight.isfinite()).sum())
        raise ModelError(
            f"layer {name} has {count} NaN or infinite weights: repair the checkpoint, or exclude={name!r}"
        )
    return weight


def _checked(name: str, result: Any, weight: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != weight.shape:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ModelError(
            f"your score gave {shape} for layer {name}; it must give a tensor of shape {tuple(weight.shape)}"
        )
    if result.is_complex():
        raise ModelError(f"your score gave complex numbers for layer {name}: they have no order")
    if not bool(result.isfinite().all()):
        raise ModelError(f"your score gave NaN or infinity for layer {name}")
    return result.detach().cpu()
