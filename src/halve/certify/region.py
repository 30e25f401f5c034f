"""Region: for every input close to an image, both networks predict the class that the dense one predicts for it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Progress
from halve.certify.certificate import Certificate
from halve.certify.proofs import EXACT, Pair, Proof, described, prove
from halve.certify.rounding import UNIT, Interval
from halve.errors import DataError, OptionError

_OUTSIDE = 1e-5  # how far normalised pixels may be out of range by rounding


def region(
    masked: nn.Module,
    dense: nn.Module,
    data: Any,
    digests: dict[str, str],
    *,
    eps: float,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    optimise: bool,
    branches: int,
    progress: Progress,
) -> Certificate:
    """Certify all inputs within `eps` of images; see `halve.certify`."""
    pair = Pair(masked, dense)

    def several(images: Tensor, labels: Sequence[int]) -> list[Proof]:
        near = box(images, eps, mean, std)
        found = pair.margins(("masked", "dense"), near, lambda network: {}, labels, optimise, branches)
        return [Proof(label, one.bound, agree=True) for label, one in zip(labels, found, strict=True)]

    proofs = prove(pair, data, several, progress)
    pixels = mean is not None
    where = f"{eps * 255:.15g}/255 per pixel" if pixels else f"{eps:.15g} per input value"
    kind = (
        "the distance is the largest change of a pixel, in 0..1 before normalisation; pixels stay in 0..1"
        if pixels
        else "the distance is the largest change of a value that the network is given"
    )
    statement = f"every change of at most {where} leaves the class unchanged, in the masked and in the dense network"
    settings: dict[str, Any] = {
        "region": eps,
        "mean": _plain(mean),
        "std": _plain(std),
        "optimise": optimise,
        "branches": branches,
    }
    settings |= {"method": "backward linear relaxation (CROWN), float64", "interrupted": proofs.interrupted}
    digests = digests | {"images": proofs.images.hexdigest()}
    return Certificate("region", described(proofs, statement), settings, (*EXACT, kind), proofs.result(), digests)


def box(image: Tensor, eps: float, mean: Sequence[float] | None, std: Sequence[float] | None) -> Interval:
    """All inputs within `eps` of images, (images, channels, ...), rounded outwards.

    >>> near = box(torch.zeros(1, 1, 1, 1, dtype=torch.float64), 0.1, [0.5], [0.5])
    >>> f"{near.high.item():.3f}", f"{box(near.high * 4.9, 0.1, [0.5], [0.5]).high.item():.3f}"
    ('0.200', '1.000')
    """
    if mean is None or std is None:
        radius = torch.full_like(image, eps)
    else:
        if len(mean) != image.shape[1] or len(std) != image.shape[1]:
            raise DataError(f"mean= and std= need one number for each of {image.shape[1]} channels")
        if not all(math.isfinite(one) for one in mean) or not all(0 < one < math.inf for one in std):
            raise OptionError(f"mean= must be finite and std= positive, got {list(mean)} and {list(std)}")
        centre, scale = (image.new_tensor(one).reshape(-1, 1, 1) for one in (mean, std))
        radius = (eps / scale).expand_as(image)
    wide = radius * (1 + 8 * UNIT) + image.abs() * (2 * UNIT)
    low, high = image - wide, image + wide
    if mean is None or std is None:
        return Interval(low, high)
    darkest, brightest = (0 - centre) / scale, (1 - centre) / scale
    if bool(((image < darkest - _OUTSIDE) | (image > brightest + _OUTSIDE)).any()):
        raise DataError(
            f"images have pixels outside of 0..1 before normalisation (values from {image.min():.3g} to "
            f"{image.max():.3g}): mean= and std= must be those that the images were normalised with"
        )
    slack = 8 * UNIT * (darkest.abs() + brightest.abs())
    low = torch.maximum(low, torch.minimum(darkest - slack, image))
    return Interval(low, torch.minimum(high, torch.maximum(brightest + slack, image)))


def _plain(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)
