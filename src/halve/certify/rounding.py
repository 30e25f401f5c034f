"""Rounding in float64, bounded: what a sum of products may differ from its exact value.

A sum of n products in any order, with or without fused operations, differs from the exact one by at most
gamma(n) * sum |a_i b_i| (Higham). This holds for matrix products on CPUs and GPUs, however they divide sums, and not
for Winograd, FFT or emulated arithmetic. PyTorch computes float64 convolutions on the CPU as matrix products, on a GPU
`exact_convolutions` keeps cuDNN away from them, and `check_products` finds emulated products.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halve.errors import CertificateError

UNIT = 2.0**-53
_TINY = 1e-250  # far more than what is lost where numbers up to `LARGEST` underflow
LARGEST = 1e50
_EMULATE = "CUBLAS_EMULATE_DOUBLE_PRECISION"
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
    wide = radius * (1 + 4 * UNIT) + value.abs() * (2 * UNIT) + _TINY
    return Interval(value - wide, value + wide)


@dataclass(frozen=True)
class Owners:
    """To which image each row of coefficients belongs, where there are several; rows are in the order of images.

    Args:
        index: The image of each row.
        images: The number of images.
        most: The largest number of rows of an image.
        place: The place of each row in a table of all images with `most` rows each.

    >>> owners = Owners.of(torch.tensor([0, 0, 2]), 3)
    >>> owners.most, owners.place.tolist(), Owners.of(torch.tensor([0, 0]), 1) is None
    (2, [0, 1, 4], True)
    """

    index: Tensor
    images: int
    most: int
    place: Tensor

    @classmethod
    def of(cls, index: Tensor, images: int) -> "Owners | None":
        """The owners of rows; None where there is one image."""
        if images == 1:
            return None
        counts = torch.bincount(index, minlength=images)
        most, starts = int(counts.max()), counts.cumsum(0) - counts
        place = index * most + torch.arange(len(index), device=index.device) - starts[index]
        return cls(index, images, most, place)


def per_row(values: Tensor, owners: Owners | None) -> Tensor:
    """Values of images, (images, ...), for each row; with one image they are broadcast."""
    return values if owners is None else values[owners.index]


def by_image(rows: Tensor, owners: Owners | None) -> Tensor:
    """Rows as a table, (images, rows, ...), with rows of zeros where an image has fewer than another."""
    if owners is None:
        return rows[None]
    table = rows.new_zeros(owners.images * owners.most, *rows.shape[1:])
    return table.index_copy(0, owners.place, rows).reshape(owners.images, owners.most, *rows.shape[1:])


def from_images(table: Tensor, owners: Owners | None) -> Tensor:
    """The values of rows, given those of a table."""
    return table[0] if owners is None else table.flatten(0, 1)[owners.place]


def dot(
    rows: Tensor, positive: Tensor, negative: Tensor, error: Tensor | float = 0.0, owners: Owners | None = None
) -> Tensor:
    """A lower bound of the dot products of rows with one vector where they are positive, and another where negative.

    Args:
        rows: Coefficients, (rows, ...).
        positive: What positive coefficients are multiplied by, (images, ...).
        negative: What negative coefficients are multiplied by.
        error: What to lose for each unit of a coefficient, in either direction, on top of rounding.
        owners: The images of the rows.
    """
    count = rows[0].numel()
    if positive is negative:
        slack = (error + positive.abs() * gamma(count)) * (1 + gamma(count)) + _TINY
        return _dot(rows, positive, owners) - _dot(rows.abs(), slack, owners)
    plus = rows.clamp(min=0)
    minus = rows - plus
    size = torch.maximum(positive.abs(), negative.abs())
    slack = (error + size * gamma(count)) * (1 + gamma(count)) + _TINY
    return _dot(plus, positive - slack, owners) + _dot(minus, negative + slack, owners)


def loss(rows: Tensor, error: Tensor, owners: Owners | None = None) -> Tensor:
    """An upper bound of what an error of each value, (images, ...), takes off the dot products of rows."""
    return _dot(rows.abs(), error * (1 + gamma(rows[0].numel())) + _TINY, owners)


def _dot(rows: Tensor, vector: Tensor, owners: Owners | None) -> Tensor:
    flat = vector.expand(len(vector), *rows.shape[1:]).reshape(len(vector), -1)
    if owners is None:
        return rows.flatten(1) @ flat[0]
    # the products with the vectors of all images cost as much as those with one: reading the rows takes the time
    return (rows.flatten(1) @ flat.T).gather(1, owners.index[:, None])[:, 0]


def total(terms: list[Tensor]) -> Tensor:
    """A lower bound of the exact sum of terms."""
    stacked = torch.stack(terms)
    return stacked.sum(0) - stacked.abs().sum(0) * gamma(len(terms)) - _TINY


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Without cuDNN, whose algorithms for convolutions do not all follow the error bound above."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


def check_products(device: torch.device) -> None:
    """Raise `CertificateError` unless matrix products in float64 follow the error bound on a device.

    Emulated products (fixed-point slices, as cuBLAS offers them) lose what is small beside the largest number of a row.
    cuBLAS may emulate large products only, which one product does not show: it must not be told to emulate any.

    >>> check_products(torch.device("cpu"))
    """
    if device.type not in ("cpu", "cuda"):
        raise CertificateError(f"bounds are computed in float64 on CPUs and CUDA GPUs, not on {device}")
    if device.type == "cuda" and (told := os.environ.get(_EMULATE, "0")) != "0":
        raise CertificateError(f"bounds need float64 products that are not emulated: unset {_EMULATE}, which is {told}")
    size = 256
    left = torch.eye(size, dtype=torch.float64, device=device)
    left[:, 0] = 2.0**100
    right = torch.full((size, size), 1 / 3, dtype=torch.float64, device=device)
    right[0] = 0.0
    if not bool(((left @ right)[1:] == 1 / 3).all()):
        raise CertificateError(f"matrix products in float64 are not exact enough on {device} to compute bounds there")
