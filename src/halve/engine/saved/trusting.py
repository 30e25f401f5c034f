"""Operators that take the sizes of their arguments on trust, with the checks that PyTorch leaves out.

They would read beyond the end of a tensor that is too small. A loaded network calls the functions here instead, which
check the sizes in each call: those of the example do not tell what they are for other inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def batch_norm_inference(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """`aten._native_batch_norm_legit_no_training`"""
    _check_channels(input, weight, bias, running_mean, running_var)
    return _ATEN._native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps)


def batch_norm_without_statistics(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    """`aten._native_batch_norm_legit.no_stats`"""
    _check_channels(input, weight, bias)
    return _ATEN._native_batch_norm_legit.no_stats(input, weight, bias, training, momentum, eps)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`aten._weight_norm`"""
    if dim in (0, v.dim() - 1) and g.shape != tuple(size if d == dim else 1 for d, size in enumerate(v.shape)):
        raise ValueError(f"g must have one value for each index along dimension {dim} of {tuple(v.shape)}")
    result: Tensor = _ATEN._weight_norm(v, g, dim)
    return result


def lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """`aten.lstm.input`"""
    directions, hidden = 1 + bidirectional, hx[0].shape[-1]
    batch = input.shape[0 if batch_first else 1]
    shapes: list[list[tuple[int, ...]]] = []
    for channels in (input.shape[2], directions * hidden):  # of the first layer, and of the others
        biases = [(4 * hidden,)] * 2 if has_biases else []
        shapes.append([(4 * hidden, channels), (4 * hidden, hidden), *biases] * directions)
    found = [tuple(tensor.shape) for tensor in params]
    if len(found) != num_layers * len(shapes[0]) or found != shapes[0] + shapes[1] * (num_layers - 1):
        raise ValueError("the weights of the LSTM do not fit its input and states")
    if input.dim() != 3 or any(tuple(state.shape) != (num_layers * directions, batch, hidden) for state in hx):
        raise ValueError("the states of the LSTM do not fit its input")
    return _ATEN.lstm.input(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _check_channels(x: Tensor, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tuple(tensor.shape) != (x.shape[1],):
            raise ValueError(f"a norm of {x.shape[1]} channels needs as many values, got shape {tuple(tensor.shape)}")


CHECKED: dict[Any, Callable[..., Any]] = {  # by operator
    _ATEN._native_batch_norm_legit_no_training.default: batch_norm_inference,
    _ATEN._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
    _ATEN._weight_norm.default: weight_norm,
    _ATEN.lstm.input: lstm,
}
TRUSTING = {function: trusting for trusting, function in CHECKED.items()}
