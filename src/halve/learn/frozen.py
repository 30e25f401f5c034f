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
    """Return a copy that does not train: plain weights in the masked layers, eval mode, single precision."""
    copy = clone(model)
    for choice in choices:
        plain_weight_(copy.get_submodule(choice.name))
    copy.float().requires_grad_(False).eval()  # the sampled weights are float32 as well
    for module in copy.modules():
        if type(module).forward is _BatchNorm.forward and module.running_mean is not None:
            module.forward = functools.partial(_normalise, module)
    return copy


def _normalise(norm: Any, input: Tensor) -> Tensor:  # BatchNorm calls its argument `input` too
    if norm.training:  # its statistics move
        momentum = 0.1 if norm.momentum is None else norm.momentum
        affine = norm.weight, norm.bias
        return F.batch_norm(input, norm.running_mean, norm.running_var, *affine, True, momentum, norm.eps)
    result: Tensor = FrozenNorm.apply(input, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    return result


class FrozenNorm(torch.autograd.Function):
    """BatchNorm with fixed statistics and a faster backward pass.

    PyTorch's backward pass took a third of a learning step. As statistics are fixed, the gradient is the norm itself
    with zero mean and zero bias, which the forward kernel computes fastest. Scale and shift get gradients if they are
    learned.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        learned = any(ctx.needs_input_grad[3:5])
        ctx.save_for_backward(var, weight, *((x, mean) if learned else ()))
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        var, weight, *inputs = ctx.saved_tensors
        grad = F.batch_norm(grads[0], torch.zeros_like(var), var, weight, None, False, 0.0, ctx.eps)
        if not inputs:
            return grad, None, None, None, None, None
        x, mean = inputs
        scale, shift = _sums(grads[0], x, mean, (var + ctx.eps).rsqrt())
        return grad, None, None, scale if ctx.needs_input_grad[3] else None, shift, None


def _sums(grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of scale and shift: sums over all positions, in the precision of the statistics."""
    if grad.is_cuda and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        # One pass over both tensors: a kernel of SyncBatchNorm. On contiguous bfloat16 its sums are off by 0.3 %.
        grad = grad.contiguous(memory_format=torch.channels_last)
        found = torch.batch_norm_backward_reduce(grad, x, mean, inverse, inverse, True, True, True)
        return found[2], found[3]
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    centred = (x.to(mean.dtype) - mean.reshape(shape)) * inverse.reshape(shape)
    wide = grad.to(mean.dtype)
    return (wide * centred).sum(axes), wide.sum(axes)
