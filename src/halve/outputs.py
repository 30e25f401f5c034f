"""Compare the outputs of two models."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

_INFINITE = float("inf")


def relative_error(got: Any, expected: Any) -> float:
    """The largest absolute difference between two outputs, relative to the largest expected value of the same tensor.

    Outputs may be tensors or nested containers of them. The error is infinite if their structure, shapes or non-tensor
    values differ, or if NaN and infinity are at different positions.

    >>> relative_error({"out": torch.tensor([1.0, 2.2])}, {"out": torch.tensor([1.0, 2.0])})
    0.10000002384185791
    >>> relative_error(torch.ones(3), torch.ones(2))
    inf
    """
    (ours, structure), (theirs, wanted) = pytree.tree_flatten(got), pytree.tree_flatten(expected)
    if structure != wanted:
        return _INFINITE
    return max((_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _difference(got: Any, expected: Any) -> float:
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return 0.0 if type(got) is type(expected) and got == expected else _INFINITE
    if got.shape != expected.shape or got.is_complex() != expected.is_complex():
        return _INFINITE
    if not expected.numel():
        return 0.0
    got, expected = _wide(got), _wide(expected)
    same = (got == expected) | (got.isnan() & expected.isnan())
    difference = torch.where(same, torch.zeros_like(expected), got - expected).abs().max()
    scale = torch.where(expected.isfinite(), expected, torch.zeros_like(expected)).abs().max()
    relative = float(difference / scale) if difference else 0.0
    return relative if relative == relative else _INFINITE  # only one of the two is NaN


def _wide(x: Tensor) -> Tensor:
    """Convert to at least single precision; integers to double, since unsigned differences would wrap around."""
    least = torch.float32 if x.is_floating_point() or x.is_complex() else torch.float64
    return x.to(torch.promote_types(x.dtype, least))
