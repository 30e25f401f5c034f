"""Weights as the kernels keep them: in groups of input channels at each kernel position, losslessly.

A sparse weight is stored as its kept values, two for each group of four channels, and one code per group: which two of
the four they are (see `halve.masks.pattern`). A dense weight is stored as all values of each group.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halve.errors import EngineError, MaskError
from halve.masks.pattern import Pattern

PATTERN = Pattern("2:4")
_PLACES = PATTERN.table().nonzero()[:, 1].reshape(PATTERN.count, PATTERN.kept)  # of each code
_WIDEST = 4  # channels in a group


class Packed(NamedTuple):
    """`values`: (rows, taps, groups, values of a group); `codes`: uint8, (rows, taps, groups), if sparse."""

    values: Tensor
    codes: Tensor | None


def group_width(channels: int) -> int:
    """Channels in a group of a dense weight.

    >>> [group_width(channels) for channels in (3, 4, 6, 7)]
    [3, 4, 3, 1]
    """
    return next(width for width in range(_WIDEST, 0, -1) if channels % width == 0)


def pack(weight: Tensor) -> Packed:
    """Pack a 2:4 weight of shape (rows, channels, *kernel). Blocks that keep fewer than two are filled with zeros.

    >>> weight = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    >>> packed = pack(weight)
    >>> packed.values.tolist(), packed.codes.tolist()
    ([[[[1.0, 2.0]]]], [[[2]]])
    >>> torch.equal(unpack(packed, (1, 4)), weight)
    True
    """
    groups = _groups(weight, PATTERN.size)
    kept = groups != 0
    if int(kept.sum(-1).max()) > PATTERN.kept:
        raise MaskError("the weight must be 2:4: a block of four input channels keeps more than two weights")
    places = kept.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., : PATTERN.kept]
    places = places.sort(dim=-1).values
    return Packed(groups.gather(-1, places), PATTERN.rank(places))


def pack_dense(weight: Tensor) -> Packed:
    """Pack all weights of a layer.

    >>> pack_dense(torch.arange(6.0).reshape(1, 6)).values.tolist()
    [[[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]]
    """
    return Packed(_groups(weight, group_width(weight.shape[1])).contiguous(), None)


def unpack(packed: Packed, shape: Sequence[int]) -> Tensor:
    """Restore the weight of this shape, including its zeros."""
    values, codes = packed
    if codes is not None:
        groups = torch.zeros(*codes.shape, PATTERN.size, dtype=values.dtype, device=values.device)
        values = groups.scatter_(-1, _PLACES.to(codes.device)[codes.long()], values)
    rows, taps = values.shape[:2]
    return values.reshape(rows, taps, -1).transpose(1, 2).reshape(tuple(shape))


def places_of(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The channels that each group keeps, ascending: (*codes.shape, 2). Raises `EngineError` for invalid codes."""
    if codes.size and codes.max() >= PATTERN.count:
        raise EngineError(f"the codes of a 2:4 weight must be below {PATTERN.count}, got {codes.max()}")
    return _PLACES.numpy()[codes]


def packed_shapes(shape: Sequence[int], sparse: bool) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shapes of the values and codes of a weight of shape (rows, channels, *kernel).

    >>> packed_shapes((16, 64, 3, 3), sparse=True), packed_shapes((16, 3), sparse=False)
    (((16, 9, 16, 2), (16, 9, 16)), ((16, 1, 1, 3), None))
    """
    rows, channels, *kernel = shape
    taps = 1
    for size in kernel:
        taps *= size
    width = PATTERN.size if sparse else group_width(channels)
    groups = (rows, taps, channels // width)
    return (*groups, PATTERN.kept if sparse else width), groups if sparse else None


def _groups(weight: Tensor, width: int) -> Tensor:
    """(rows, channels, *kernel) -> (rows, taps, groups, width)"""
    rows, channels = weight.shape[:2]
    return weight.reshape(rows, channels, -1).transpose(1, 2).reshape(rows, -1, channels // width, width)
