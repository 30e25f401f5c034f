"""Rounding in float64, bounded: what a sum of products may differ from its exact value.

A sum of n products in any order, with or without fused operations, differs from the exact one by at most
gamma(n) * sum |a_i b_i| (Higham). This holds for plain matrix products, not for Winograd or FFT convolutions: PyTorch
computes float64 convolutions as matrix products on the CPU, and `exact_convolutions` keeps cuDNN away from them.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

UNIT = 2.0**-53
_MARGIN = 16  # operations besides the sum: products, an addition, and computing the bound itself


class Interval(NamedTuple):
    """All values between two tensors, elementwise."""

    low: Tensor
    high: Tensor

    @property
    def center(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Tensor:
        """At least the distance of both ends from the computed center."""
        center = self.center
        return torch.maximum(self.high - center, center - self.low) * (1 + 4 * UNIT)

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute value."""
        return torch.maximum(self.low.abs(), self.high.abs())


def gamma(terms: int) -> float:
    """The relative error of a sum of products, with a factor of 2 for computing its bound in floating point as well.

    >>> gamma(1000) < 1e-12
    True
    """
    return 2 * (terms + _MARGIN) * UNIT


def around(value: Tensor, radius: Tensor) -> Interval:
    """The interval of everything within a radius, rounded outwards."""
    wide = radius * (1 + 4 * UNIT) + value.abs() * (2 * UNIT)
    return Interval(value - wide, value + wide)


def dot(rows: Tensor, positive: Tensor, negative: Tensor, error: Tensor | float = 0.0) -> Tensor:
    """A lower bound of the dot products of rows with one vector where they are positive, and another where negative.

    Args:
        rows: Coefficients, (rows, ...).
        positive: What positive coefficients are multiplied by, (...) or (rows, ...).
        negative: What negative coefficients are multiplied by.
        error: What to lose for each unit of a coefficient, in either direction, on top of rounding.
    """
    plus, count = rows.clamp(min=0), rows[0].numel()
    minus = rows - plus
    size = torch.maximum(positive.abs(), negative.abs())
    slack = (error + size * gamma(count)) * (1 + gamma(count))
    return _dot(plus, positive - slack) + _dot(minus, negative + slack)


def _dot(rows: Tensor, vector: Tensor) -> Tensor:
    if vector.dim() == rows.dim():
        return (rows * vector).flatten(1).sum(1)
    return rows.flatten(1) @ vector.expand(rows.shape[1:]).reshape(-1)


def total(terms: list[Tensor]) -> Tensor:
    """A lower bound of the exact sum of terms."""
    stacked = torch.stack(terms)
    return stacked.sum(0) - stacked.abs().sum(0) * gamma(len(terms))


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Without cuDNN, whose algorithms for convolutions do not all follow the error bound above."""
    with torch.backends.cudnn.flags(enabled=False):
        yield
