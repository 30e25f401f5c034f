"""The engine's operations: a convolution or Linear layer with bias, residual and activation in one.

Registered with torch.library, so that torch.compile and torch.export see them as they are. Each has a reference
implementation in plain PyTorch, which is also what runs where there is no kernel for it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> Tensor:
    """activation(conv(x, weight) + bias + residual)

    >>> x, weight = torch.ones(1, 1, 2, 2), -torch.ones(1, 1, 1, 1)
    >>> conv2d(x, weight, None, torch.full_like(x, 3.0), [1, 1], [0, 0], [1, 1], 1, "relu").unique().tolist()
    [2.0]
    """
    return _finished(F.conv2d(x, weight, bias, stride, padding, dilation, groups), residual, activation)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """activation(x weight^T + bias + residual)

    >>> linear(torch.ones(1, 2), torch.ones(3, 2), None, None, "none").tolist()
    [[2.0, 2.0, 2.0]]
    """
    return _finished(F.linear(x, weight, bias), residual, activation)


def _finished(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    y = y if residual is None else y + residual
    return ACTIVATIONS[activation](y)


conv2d = torch.library.custom_op("halve::conv2d", _conv2d, mutates_args=())
linear = torch.library.custom_op("halve::linear", _linear, mutates_args=())
conv2d.register_fake(_conv2d)  # plain PyTorch runs on tensors without numbers as well
linear.register_fake(_linear)
