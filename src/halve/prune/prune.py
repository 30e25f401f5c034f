"""Prune in one shot: choose masks by a score."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from halve.batches import Forward, Progress, iterate, peeked, reiterable, tracked
from halve.errors import DataError
from halve.masks.mask import Mask, MaskSet
from halve.masks.recipe import origin_of, with_digests, with_fingerprint
from halve.modules import unwrapped
from halve.permute.permute import SECONDS
from halve.permute.permute import permute as search_orders
from halve.process_state import preserved_process_state
from halve.prune.recalibrate import recalibrate as recalibrate_masks
from halve.prune.score import ScoreFunction, ScoreInputs
from halve.prune.scores import check_data, score_of
from halve.select.select import Choice, SelectOptions, masked_weights, plain_options, select


@preserved_process_state()
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
    progress: Progress = True,
    **selection: Unpack[SelectOptions],
) -> MaskSet:
    """Choose masks in one shot: each block keeps the N weights with the highest scores.

    `halve.apply(model, masks)` returns a masked copy of the model.

    Args:
        model: The dense model. It is not changed.
        score: "magnitude" (default), "random", or with `data` "wanda" (magnitude times input norm) or "reconstruct"
            (whole masks that change each layer's outputs least); or a function of (layer name, weight) that returns
            scores of the weight's shape.
        data: Batches of images to measure on, without labels: a DataLoader, a list, or one tensor of images. Layers
            that never run on them are not masked.
        recalibrate: Also measure BatchNorm statistics on `data` with the masks applied, and store them with the masks.
            "reconstruct" then chooses masks that are better with such statistics, and worse without. Default: False.
        permute: Search for channel orders in which blocks keep more of the score. Masks still refer to the checkpoint;
            `apply` moves the channels. Default: False.
        permute_seconds: Time limit of that search. Default: 120.
        example: A batch to capture the model's structure on, with any content (default: the first of `data`).
        seed: Seed for "random" and all sampling. Default: 0.
        forward: `forward(model, batch)` runs the model on an unusual batch.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        **selection: The options of `select`: pattern, include, exclude, also, order, remainder, kinds.

    >>> import halve
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
    >>> halve.prune(model, pattern="1:4")
    MaskSet(1 layer, 288 weights, 25.0 % kept)
    """
    model = unwrapped(model)
    chosen_score = score_of(score)
    check_data(chosen_score, data)
    if recalibrate and data is None:
        raise DataError("recalibrate=True needs data: pass data=, batches of images")
    look_at, data = peeked(reiterable(data) if permute else data)
    chosen = select(model, **selection, data=look_at, forward=forward)
    weights = masked_weights(model, chosen)
    choices: Sequence[Choice] = chosen.masked
    inputs = ScoreInputs(model, choices, weights, data, recalibrate, seed, forward, progress)
    permutation, found = None, None
    if permute:
        if example is None and data is not None:
            example = next(iterate(data))
        if example is None:
            raise DataError("permute=True needs a batch to capture the model on: pass example=, images of any content")
        by = chosen_score.search_score or chosen_score
        found = by.compute(inputs)
        permutation = search_orders(
            *(model, choices, by.for_search(found), example),
            seconds=permute_seconds,
            seed=seed,
            forward=forward,
            progress=progress,
        )
        choices = permutation.choices
    if found is None or chosen_score.search_score is not None:
        found = chosen_score.compute(replace(inputs, choices=choices))
    recipe = {
        "method": "prune",
        "score": chosen_score.name,
        "images": found.images,
        "seed": seed,
        "selection": plain_options(selection),
        "not_masked": chosen.not_masked,
        "permute": None if permutation is None else permutation.summary,
    }
    masks = {}
    for choice in tracked(choices, progress, "layers"):
        assert choice.pattern is not None
        assert choice.layout is not None
        mask = Mask.from_scores(choice.pattern, choice.layout, found.by_layer.pop(choice.name))
        masks[choice.name] = with_fingerprint(mask, weights[choice.name], choice.shared_with)
    result = MaskSet(masks, recipe=recipe | origin_of(model), moves=permutation.moves if permutation else None)
    result = with_digests(result, model)
    return recalibrate_masks(model, result, data, forward=forward, progress=progress) if recalibrate else result
