"""What is lost when one layer alone is masked: classes, features, and spatial frequencies of the features."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import halve
from halve.learn.objective import watching

EDGES = (0.0, 1 / 6, 1 / 3, 1 / 2)  # upper ends of the bands, in cycles per pixel: constant, low, middle, high
BANDS = ("constant", "low", "middle", "high")


def layers_alone(model: nn.Module, masks: halve.MaskSet, batches: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """What the mask of each layer does if all others are dense, by name.

    Each has `agreement`, `kl` and `agreement_by_class`; of the layer's outputs `feature_error`, which is the norm of
    their difference relative to their norm, the share of its square that is an `offset` of channels, the same for all
    images and places, and `bands`: by spatial frequency, the share of the squared error and of the dense squares that
    lies in a band (None where the maps are too small for it); of the weights `dropped`, the share of their squares, and
    their number.
    """
    kept = list(batches)
    return {name: _alone(model, masks, name, kept) for name in masks}


@torch.no_grad()
def _alone(model: nn.Module, masks: halve.MaskSet, name: str, batches: list[Any]) -> dict[str, Any]:
    masked = halve.apply(model, masks.without([other for other in masks if other != name]))
    flips, kl, images = dict[int, list[int]](), 0.0, 0
    error = power = count = 0.0
    offset: Tensor | None = None
    bands: dict[str, Tensor] = {}
    for batch in batches:
        with watching(model, [name]) as features:
            dense = model(batch[0]).double()
        with watching(masked, [name]) as changed:
            ours = masked(batch[0]).double()
        [there], [here] = features, changed
        there, difference = there.double(), here.double() - there.double()
        for old, new in zip(dense.argmax(1).tolist(), ours.argmax(1).tolist(), strict=True):
            flips.setdefault(old, []).append(int(old == new))
        kl += float((dense.softmax(1) * (dense.log_softmax(1) - ours.log_softmax(1))).sum())
        images += len(dense)
        error, power = error + float(difference.square().sum()), power + float(there.square().sum())
        axes = [axis for axis in range(there.dim()) if axis != 1]
        offset = difference.sum(axes) + (0 if offset is None else offset)
        count += difference.numel() / difference.shape[1]
        for part, values in (("error", difference), ("power", there)):
            if values.dim() == 4:
                bands[part] = by_frequency(values) + bands.get(part, 0)
    assert offset is not None
    weight = model.get_submodule(name).weight.detach().double()
    gone = weight * ~masks[name].kept().to(weight.device)
    found = {
        "agreement": sum(map(sum, flips.values())) / images,
        "kl": kl / images,
        "agreement_by_class": {str(label): sum(same) / len(same) for label, same in sorted(flips.items())},
        "feature_error": math.sqrt(error / power),
        "offset": float(offset.square().sum()) / count / max(error, 1e-30),
        "dropped": float(gone.square().sum() / weight.square().sum()),
        "weights": weight.numel(),
    }
    if bands:
        shares = {part: (squares / squares.sum()).tolist() for part, squares in bands.items()}
        there_are = (bands["power"] > 0).tolist()
        found["bands"] = {
            band: {part: shares[part][i] if there_are[i] else None for part in shares} for i, band in enumerate(BANDS)
        }
    return found


def by_frequency(features: Tensor) -> Tensor:
    """The sum of squares of feature maps, (images, channels, height, width), in bands from low to high frequencies.

    >>> wave = torch.tensor([1.0, -1.0]).repeat(4)
    >>> by_frequency(torch.ones(1, 1, 8, 8)).tolist(), by_frequency(wave.expand(1, 1, 8, 8)).tolist()
    ([64.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 64.0])
    """
    height, width = features.shape[2:]
    squares = torch.fft.fft2(features, norm="ortho").abs().square().sum((0, 1))
    rows, columns = (torch.fft.fftfreq(size, device=features.device).abs() for size in (height, width))
    highest = torch.maximum(rows[:, None], columns[None, :])
    edges = torch.tensor(EDGES, device=features.device)
    band = torch.bucketize(highest, edges + 1e-6)
    return torch.zeros(len(EDGES), dtype=squares.dtype, device=squares.device).index_add(
        0, band.flatten(), squares.flatten()
    )
