"""Digits networks trained with a given weight decay, and what can be proven of their masks."""

import statistics
from typing import Any

import torch
from torch import Tensor, nn

import halve
from halve.sources.digits import DigitsResNet, _shifted, digits
from halve.sources.small_resnet import train_

REGION, UPDATE = 4 / 255, 4e-3  # of pixels in 0..1, and of the weights' root mean square
PROVEN = 6  # images: a proof takes seconds


def dense_with(decay: float, seed: int, epochs: int = 12) -> nn.Module:
    """The digits network, trained as in the demo of digits but with this weight decay."""
    images, labels = digits("train").tensors
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsResNet()
        train_(model, images, labels, epochs=epochs, batch=64, weight_decay=decay, augment=_shifted)
    return model


def proofs(model: nn.Module, masks: halve.MaskSet, images: Tensor) -> dict[str, Any]:
    """What certificates say of a few images, and the norms that the paper's bounds are made of.

    `region` and `reuse` have the share of images that is certified, and the median share of the margin of the masked
    network that the proof leaves: 1 if nothing could change, below 0 if nothing is proven. `norms` are the largest
    singular values of what the masks drop, the mean over layers: as stored, with the BatchNorm that follows folded in,
    and relative to the dense weight's.
    """
    some = images[:PROVEN].cpu()
    masked = halve.apply(model, masks).cpu()
    with torch.no_grad():
        scores = masked(some).double().sort(1, descending=True).values
    margins = (scores[:, 0] - scores[:, 1]).tolist()
    found: dict[str, Any] = {"proven_images": len(some), "margin": statistics.median(margins)}
    found["norms"] = dropped_norms(model, masks)
    statements: dict[str, dict[str, Any]] = {"region": {"region": REGION, "mean": [0.5], "std": [0.5]}}
    statements["reuse"] = {"reuse": UPDATE}
    for name, statement in statements.items():
        result = halve.certify(model.cpu(), masks, some, optimise=False, progress=False, **statement).result
        left = [
            one["margin"] / margin
            for one, margin in zip(result["per_image"], margins, strict=True)
            if one.get("margin") is not None
        ]
        found[name] = {"share": result["share"], "margin_left": statistics.median(left) if left else None}
    return found


def dropped_norms(model: nn.Module, masks: halve.MaskSet) -> dict[str, float]:
    """Spectral norms of what masks drop: the mean over layers, stored, folded and relative."""
    modules = dict(model.named_modules())
    stored, folded, relative = [], [], []
    for name, mask in masks.items():
        weight = modules[name].weight.detach().double().flatten(1)
        gone = weight * ~mask.kept().to(weight.device).flatten(1)
        norm = modules[following_norm(name)]
        scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().double()[:, None]
        stored.append(_spectral(gone))
        folded.append(_spectral(scale * gone))
        relative.append(_spectral(gone) / _spectral(weight))
    return {
        kind: statistics.mean(values)
        for kind, values in (("stored", stored), ("folded", folded), ("relative", relative))
    }


def following_norm(name: str) -> str:
    """The BatchNorm after a convolution of a SmallResNet.

    >>> following_norm("layer1.0.conv2"), following_norm("layer2.0.shortcut.0")
    ('layer1.0.bn2', 'layer2.0.shortcut.1')
    """
    return name.replace("conv", "bn") if "conv" in name else name.removesuffix("0") + "1"


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
