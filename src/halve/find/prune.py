"""Masks from one-shot scores."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from halve.errors import DataError, ModelError, listed
from halve.find import scores
from halve.find.activations import input_squares
from halve.find.batches import Forward, Progress
from halve.find.recalibrate import recalibrate as recalibrate_masks
from halve.find.select import Choice, Selection, SelectOptions, select
from halve.masks.fingerprint import Fingerprint
from halve.masks.layers import weight_of
from halve.masks.mask import Mask, MaskSet
from halve.version import VERSION

ScoreFunction = Callable[[str, Tensor], Tensor]


def prune(
    model: nn.Module,
    score: str | ScoreFunction = "magnitude",
    data: Any = None,
    *,
    recalibrate: bool = False,
    seed: int = 0,
    forward: Forward | None = None,
    progress: Progress | None = None,
    **selection: Unpack[SelectOptions],
) -> MaskSet:
    """Choose masks at once, by a score: in each block the N weights with the highest score are kept.

    - `score`: "magnitude", "wanda" (magnitude times input norm, needs `data`), "random" (by `seed`), or a function of
      (layer name, weight) that gives scores of the weight's shape.
    - `data`: batches to measure inputs on, no labels needed; a DataLoader, a list, or one tensor of images.
    - `recalibrate`: also measure BatchNorm statistics on `data` with the masks on; they travel with the masks.
    - the rest are the options of `select`: pattern, include, exclude, also, order, remainder.

    The model stays as it is. `halve.apply(model, masks)` gives a masked copy.

    >>> import halve
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
    >>> halve.prune(model, pattern="1:4")
    MaskSet(1 layer, 288 weights, 25.0 % kept)
    """
    if not callable(score) and (not isinstance(score, str) or score not in scores.SCORES):
        raise ModelError(f"unknown score {score!r}; there are {listed(scores.SCORES)}, or pass a function")
    needs_data = isinstance(score, str) and score in scores.NEEDS_DATA
    if data is None and (needs_data or recalibrate):
        raise DataError(
            f"{'recalibration' if recalibrate else f'score {score!r}'} needs data: pass data=batches of images"
        )
    chosen = select(model, **selection)
    check_something_masked(chosen)
    weights = {choice.name: finite_weight(choice.name, model) for choice in chosen.masked}
    squares: dict[str, Tensor] = {}
    images = 0
    if needs_data:
        squares, images = input_squares(model, chosen.masked, data, forward, progress)
    generator = torch.Generator().manual_seed(seed)

    def score_of(choice: Choice, weight: Tensor) -> Tensor:
        if callable(score):
            return _checked(choice.name, score(choice.name, weight.clone()), weight)
        if score == "random":
            return scores.random(weight, generator)
        if score == "wanda" and choice.name in squares:
            return scores.wanda(weight, squares[choice.name])
        return scores.magnitude(weight)  # also for a layer that the data never reached

    recipe = {
        "method": "prune",
        "score": getattr(score, "__name__", "function") if callable(score) else score,
        "images": images,
        "seed": seed,
        "selection": _plain(selection),
    }
    track = progress or (lambda items, _: items)
    masks = {}
    for choice in track(chosen.masked, "layers"):
        masks[choice.name] = mask_from(choice, weights[choice.name], score_of(choice, weights[choice.name]))
    result = MaskSet(masks, recipe=recipe | origin_of(model))
    return recalibrate_masks(model, result, data, forward=forward, progress=progress) if recalibrate else result


def mask_from(choice: Choice, weight: Tensor, score: Tensor) -> Mask:
    """The mask that keeps the highest scores, with the fingerprint of the weight that it is made for."""
    assert choice.pattern is not None
    assert choice.layout is not None
    mask = Mask.from_scores(choice.pattern, choice.layout, score)
    print_ = Fingerprint.of(weight, mask.put_on(weight))
    return Mask(choice.pattern, choice.layout, mask.stored_codes, print_, choice.shared_with)


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


def origin_of(model: nn.Module) -> dict[str, Any]:
    """What a recipe says of the model and of the software."""
    kind = type(model)
    return {"model": f"{kind.__module__}.{kind.__qualname__}", "halve": VERSION, "torch": torch.__version__}


def _plain(selection: SelectOptions) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return list(value)
        return value if value is None else str(value)

    return {key: plain(value) for key, value in selection.items()}


def _checked(name: str, result: Any, weight: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != weight.shape:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ModelError(
            f"your score gave {shape} for layer {name}; it must give a tensor of shape {tuple(weight.shape)}"
        )
    if not bool(result.isfinite().all()):
        raise ModelError(f"your score gave NaN or infinity for layer {name}")
    return result.detach().cpu()
