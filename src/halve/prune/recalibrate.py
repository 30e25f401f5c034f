"""Recalibrate BatchNorm statistics for a masked model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halve.batches import Forward, Progress, count_of, iterate, result_of
from halve.errors import ModelError
from halve.masks.apply import OnChanged, applied_in_checkpoint_order, check_dense, check_fit, is_unchanged
from halve.masks.mask import MaskSet
from halve.masks.recipe import with_digests
from halve.modules import clone, unwrapped
from halve.process_state import preserved_process_state
from halve.prune.statistics import check_finite


@preserved_process_state()
def recalibrate(
    model: nn.Module,
    masks: MaskSet,
    data: Any,
    *,
    forward: Forward | None = None,
    progress: Progress = True,
    on_changed: OnChanged = "warn",
) -> MaskSet:
    """Return the same masks with BatchNorm statistics that are corrected for the effect of the masks.

    The dense and the masked model run on the same images with batch statistics. The model's own statistics are then
    corrected by the difference between the two: means are shifted, variances are scaled by the ratio. A mask that
    removes nothing changes no statistics, and images that differ slightly from the training images (other crops, no
    augmentation) do no harm. A few thousand images in batches of 64 or more are enough.

    The statistics are stored with the masks, and `apply` copies them into the masked model.

    Args:
        model: The dense model. It is not changed.
        masks: Its masks.
        data: Batches of images; labels are not needed.
        forward: `forward(model, batch)` runs the model on an unusual batch.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".

    >>> import halve
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 2)).eval()
    >>> masks = halve.recalibrate(model, halve.prune(model), torch.randn(256, 4, 8, 8))
    >>> sorted(masks.statistics)
    ['1.running_mean', '1.running_var']
    """
    model = unwrapped(model)
    check_dense(model, masks)
    sparse = applied_in_checkpoint_order(model, masks.with_statistics({}), on_changed)
    dense = clone(model)
    norms, before = _measuring_(sparse), _measuring_(dense)
    if not norms:
        raise ModelError(f"{type(model).__name__} has nothing to recalibrate: no BatchNorm with running statistics")
    original = dict(model.named_buffers(remove_duplicate=False))
    images = 0
    with torch.no_grad():
        for batch in iterate(data, progress, "BatchNorm statistics"):
            result = result_of(sparse, batch, forward)
            result_of(dense, batch, forward)
            images += count_of(batch, result, forward)
    statistics: dict[str, Tensor] = {}
    for name, norm in norms.items():
        if int(norm.num_batches_tracked or 0) == 0:
            continue  # does not run at inference, such as an auxiliary classifier
        mean, variance = original[f"{name}.running_mean"], original[f"{name}.running_var"]
        shift = _of(norm, "running_mean") - _of(before[name], "running_mean")
        eps = norm.eps
        ratio = (_of(norm, "running_var") + eps) / (_of(before[name], "running_var") + eps)
        statistics[f"{name}.running_mean"] = mean + shift
        statistics[f"{name}.running_var"] = (variance + (variance + eps) * (ratio - 1)).clamp(min=0)
        check_finite(name, statistics[f"{name}.running_mean"], statistics[f"{name}.running_var"])
    if masks.digests is None and all(is_unchanged(w, masks[name]) for name, w in check_fit(model, masks).items()):
        masks = with_digests(masks, model)  # a file from before masks had digests
    return masks.with_statistics(statistics).with_recipe(recalibrated_on_images=images)


def _measuring_(copy: nn.Module) -> dict[str, _BatchNorm]:
    """Make every BatchNorm of a model normalise by batch statistics and average them; returns them by name."""
    copy.eval()
    norms = {
        name: module
        for name, module in copy.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over all batches
        norm.train()
    return norms


def _of(norm: nn.Module, key: str) -> Tensor:
    value: Tensor = getattr(norm, key)
    return value
