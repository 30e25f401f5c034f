"""Attacks: look for inputs, updates and masks that change a prediction.

What an attack finds is a fact, and what it does not find proves nothing. Attacks show how tight bounds are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from halve.certify.rounding import Interval

_STEPS, _STARTS = 20, 2


def margin_of(scores: Tensor, label: int) -> Tensor:
    """How far the score of a class is above all others."""
    others = torch.cat([scores[..., :label], scores[..., label + 1 :]], -1)
    return scores[..., label] - others.max(-1).values


def attack_input(
    model: nn.Module, box: Interval, label: int, steps: int = _STEPS, starts: int = _STARTS, seed: int = 0
) -> float:
    """The smallest margin found among the inputs in a box, by projected gradient descent.

    Args:
        model: The network, in float64.
        box: The inputs, without a batch dimension.
        label: The class.
        steps: Steps of the descent. Default: 20.
        starts: Where it starts: the center, and random inputs. Default: 2.
        seed: Seed of the random inputs. Default: 0.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high, least = box.low[None], box.high[None], float("inf")
    for start in range(starts):
        share = torch.rand(low.shape, generator=generator, dtype=low.dtype) if start else 0.5
        x = low + (high - low) * share
        for step in range(steps + 1):
            x = x.detach().requires_grad_(True)
            with torch.enable_grad():
                margin = margin_of(model(x)[0], label)
            least = min(least, float(margin.detach()))
            if step == steps:
                break
            [gradient] = torch.autograd.grad(margin, x)
            x = x.detach() - (high - low) / 2 * (1.0 if step == 0 else 0.3) * gradient.sign()
            x = torch.minimum(torch.maximum(x, low), high)
    return least


def attack_weights(
    model: nn.Module, image: Tensor, label: int, radii: Mapping[str, Tensor], steps: int = _STEPS
) -> float:
    """The smallest margin found among updates of the weights, by projected gradient descent.

    Args:
        model: The network, in float64.
        image: The input, without a batch dimension.
        label: The class.
        radii: How far each weight may move, by layer.
        steps: Steps of the descent. Default: 20.
    """
    names = {f"{layer}.weight": radius for layer, radius in radii.items()}
    parameters = dict(model.named_parameters())
    moved = {name: torch.zeros_like(radius) for name, radius in names.items()}
    least = float("inf")
    for step in range(steps + 1):
        weights = {name: (parameters[name].detach() + moved[name]).requires_grad_(True) for name in names}
        with torch.enable_grad():
            margin = margin_of(torch.func.functional_call(model, weights, (image[None],))[0], label)
        least = min(least, float(margin.detach()))
        if step == steps:
            break
        gradients = torch.autograd.grad(margin, list(weights.values()))
        for name, gradient in zip(names, gradients, strict=True):
            change = moved[name] - names[name] * (1.0 if step == 0 else 0.3) * gradient.sign()
            moved[name] = torch.minimum(torch.maximum(change, -names[name]), names[name])
    return least
