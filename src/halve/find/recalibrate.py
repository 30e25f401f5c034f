"""BatchNorm statistics that fit a masked model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halve.errors import DataError, ModelError
from halve.find.batches import Forward, Progress, images_of, iterate, run
from halve.masks.apply import Changed, apply
from halve.masks.mask import MaskSet


def recalibrate(
    model: nn.Module,
    masks: MaskSet,
    data: Any,
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
    changed: Changed = "warn",
) -> MaskSet:
    """The same masks, with BatchNorm statistics measured on `data` (no labels needed) while the masks are on.

    The statistics travel with the masks and are put on by `apply`; the model stays as it is. Mean and variance are
    averages over the batches: a few thousand images in batches of 64 or more are enough.

    >>> import halve
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 2)).eval()
    >>> masks = halve.recalibrate(model, halve.prune(model), torch.randn(256, 4, 8, 8))
    >>> sorted(masks.statistics)
    ['1.running_mean', '1.running_var']
    """
    copy = apply(model, MaskSet(masks), changed=changed).eval()
    norms = {
        name: module
        for name, module in copy.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    if not norms:
        raise ModelError(f"{type(model).__name__} has no BatchNorm with running statistics: nothing to recalibrate")
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over all batches
        norm.train()
    images = 0
    with torch.no_grad():
        for batch in iterate(data, progress, "BatchNorm statistics"):
            output = run(copy, batch, forward)
            images += len(images_of(batch)) if forward is None else len(output)
    statistics: dict[str, Tensor] = {}
    for name, norm in norms.items():
        if int(norm.num_batches_tracked or 0) == 0:
            continue  # this layer does not run at inference, such as an auxiliary classifier
        for key in ("running_mean", "running_var"):
            value: Tensor = getattr(norm, key)
            if not bool(value.isfinite().all()):
                raise DataError(f"layer {name} gets NaN or infinite inputs: check the images and their normalisation")
            statistics[f"{name}.{key}"] = value
    return masks.with_statistics(statistics).with_recipe(recalibrated_on_images=images)
