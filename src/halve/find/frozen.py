"""The frozen model that learning runs: a private copy with plain weights, in eval mode, fast to differentiate."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halve.find.select import Choice
from halve.masks.layers import clone, set_weight_, weight_of


def frozen(model: nn.Module, choices: Sequence[Choice]) -> nn.Module:
    """A copy that does not train: plain weights in the masked layers, eval mode, full precision."""
    copy = clone(model)
    for choice in choices:
        layer = copy.get_submodule(choice.name)
        set_weight_(layer, weight_of(layer))
    copy.float().requires_grad_(False).eval()  # in full precision, as the sampled weights are
    for module in copy.modules():
        if type(module).forward is _BatchNorm.forward and module.running_mean is not None:
            module.forward = Normalise(module)
    return copy


def channels_last_(copy: nn.Module) -> None:
    """Lay out what 2d convolutions multiply with as GPUs like it."""
    for parameter in copy.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class Normalise:
    """A BatchNorm's forward with fixed statistics; what its derivative needs is computed once for each device."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm
        self._factors: dict[torch.device, tuple[Tensor, ...]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        if x.device not in self._factors:
            scale = (norm.running_var + norm.eps).rsqrt()
            scale = scale if norm.weight is None else scale * norm.weight
            # a mean of 0 and a deviation of sqrt(0.5 + 0.5) = 1
            self._factors[x.device] = scale, torch.zeros_like(scale), torch.full_like(scale, 0.5)
        statistics = (norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
        result: Tensor = _FrozenNorm.apply(x, statistics, self._factors[x.device])
        return result


class _FrozenNorm(torch.autograd.Function):
    """BatchNorm with fixed statistics.

    PyTorch's own derivative of it took a third of a learning step. When nothing of the norm is trained, all that is
    left of it is one factor per channel, which the forward kernel multiplies with fastest.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, statistics: tuple[Any, ...], factors: tuple[Tensor, ...]) -> Tensor:
        ctx.factors = factors
        mean, var, weight, bias, eps = statistics
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, zero, half = ctx.factors
        return F.batch_norm(grads[0], zero, half, scale, None, False, 0.0, 0.5), None, None
