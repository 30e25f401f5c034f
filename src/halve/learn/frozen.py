"""The frozen model that learning runs: a private copy with plain weights, in eval mode, fast to differentiate."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halve.modules import clone, plain_weight_
from halve.select.select import Choice


def frozen(model: nn.Module, choices: Sequence[Choice]) -> nn.Module:
    """A copy that does not train: plain weights in the masked layers, eval mode, full precision."""
    copy = clone(model)
    for choice in choices:
        plain_weight_(copy.get_submodule(choice.name))
    copy.float().requires_grad_(False).eval()  # in full precision, as the sampled weights are
    for module in copy.modules():
        if type(module).forward is _BatchNorm.forward and module.running_mean is not None:
            module.forward = functools.partial(_normalise, module)
    return copy


def channels_last_(copy: nn.Module) -> None:
    """Lay out what 2d convolutions multiply with as GPUs like it."""
    for parameter in copy.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _normalise(norm: Any, input: Tensor) -> Tensor:  # by the name that BatchNorm gives it
    result: Tensor = FrozenNorm.apply(input, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    return result


class FrozenNorm(torch.autograd.Function):
    """BatchNorm with fixed statistics.

    PyTorch's own derivative of it took a third of a learning step. When nothing of the norm is trained, it is the norm
    itself with a mean and a bias of zero, and the forward kernel computes that fastest.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(var, weight)
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        var, weight = ctx.saved_tensors
        grad = F.batch_norm(grads[0], torch.zeros_like(var), var, weight, None, False, 0.0, ctx.eps)
        return grad, None, None, None, None, None
