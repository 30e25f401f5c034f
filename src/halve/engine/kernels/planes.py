"""Planes: a memory layout with all pixels of a channel in a row, for vectors that hold consecutive pixels.

The pixels of all images lie behind each other: (N, C, H, W) is stored as C planes of N * H * W numbers, and the rows of
a matrix (..., C) likewise. Planes start a fixed number of elements apart, the *pitch*. A single image that is
contiguous is such a tensor.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LANES = 16  # kernels write whole vectors
_CONFLICTING = 512  # planes this many elements apart would share few lines of the cache


def pitch_for(pixels: Any) -> Any:
    """The pitch of new planes: whole vectors, and no large power of two.

    >>> pitch_for(49), pitch_for(3136), pitch_for(1024)
    (64, 3136, 1040)
    """
    pitch = (pixels + _LANES - 1) // _LANES * _LANES
    return pitch + _LANES * ((_CONFLICTING - pitch % _CONFLICTING) // _CONFLICTING)


def empty_planes(shape: Sequence[Any], channel_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape, not initialised, stored as planes.

    >>> empty_planes((2, 3, 7, 7), 1, torch.float32, torch.device("cpu")).stride()
    (49, 112, 7, 1)
    >>> empty_planes((5, 3), -1, torch.float32, torch.device("cpu")).stride()
    (1, 16)
    """
    strides, count = strides_of(shape, channel_dim)
    return torch.empty(count, dtype=dtype, device=device).as_strided(tuple(shape), strides)


def strides_of(shape: Sequence[Any], channel_dim: int) -> tuple[tuple[Any, ...], Any]:
    """The strides of new planes, and how many numbers they take.

    >>> strides_of((2, 3, 7, 7), 1)
    ((49, 112, 7, 1), 336)
    """
    dims = [size for dim, size in enumerate(shape) if dim != channel_dim % len(shape)]
    pixels: Any = 1
    strides: list[Any] = []
    for size in reversed(dims):
        strides.insert(0, pixels)
        pixels = pixels * size
    pitch = pitch_for(pixels)
    strides.insert(channel_dim % len(shape), pitch)
    return tuple(strides), shape[channel_dim] * pitch


def is_planes(x: Tensor, channel_dim: int) -> bool:
    """Whether a tensor is stored as planes, of any pitch.

    >>> image = torch.zeros(1, 3, 5, 5)
    >>> is_planes(image, 1), is_planes(image.to(memory_format=torch.channels_last), 1)
    (True, False)
    """
    return _are_planes(x.shape, x.stride(), channel_dim)


@functools.lru_cache(4096)
def _are_planes(shape: tuple[int, ...], strides: tuple[int, ...], channel_dim: int) -> bool:
    pixels = 1
    for dim in reversed(range(len(shape))):
        if dim == channel_dim % len(shape):
            continue
        if shape[dim] != 1 and strides[dim] != pixels:
            return False
        pixels *= shape[dim]
    return shape[channel_dim] <= 1 or strides[channel_dim] >= pixels


def has_rows(x: Tensor) -> bool:
    """Whether the pixels of each channel of an image lie in a row, wherever channels and images are."""
    return x.dim() == 4 and x.stride()[2:] == (x.shape[3], 1)


def to_planes(x: Tensor, channel_dim: int) -> Tensor:
    """The tensor stored as planes: itself, or a copy."""
    return x if is_planes(x, channel_dim) else empty_planes(x.shape, channel_dim, x.dtype, x.device).copy_(x)
