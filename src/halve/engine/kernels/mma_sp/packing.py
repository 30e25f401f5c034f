"""Pack 2:4 weights in the register layout of sparse tensor cores (`mma.sp` m16n8k32, 16-bit), losslessly.

The weight is a matrix of output channels by K, with K in the order (kernel row, kernel column, channel). It is padded
with zeros: channels to a multiple of 64 at each kernel position, rows to a multiple of 16. The values that a warp needs
for 16 rows and 32 columns are contiguous: eight for each of its 32 lanes. The metadata of 64 columns is one 32-bit word
per lane.

Lane 4 g + q holds rows g and g + 8. Each row keeps 16 of 32 columns. The lane's values are kept columns 2q and 2q + 1
of row g, then of row g + 8, then kept columns 2q + 8 and 2q + 9 of both rows. The word of lane q describes columns
16 q .. 16 q + 15 of the 64: bits 0-15 for row g, bits 16-31 for row g + 8. Each block of four columns takes four bits:
the indices of its two values, the first in the low two bits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.errors import MaskError

ROWS, CHANNELS = 16, 64  # rows and channels are padded to multiples of these
_LANES = 32


class Packed(NamedTuple):
    """`values`: (row tiles, steps of 32 columns, lanes, 8); `metadata`: int32, (row tiles, steps of 64, lanes)."""

    values: Tensor
    metadata: Tensor
    shape: tuple[int, ...]  # of the weight: (rows, channels, *kernel)


def pack(weight: Tensor, kept: Tensor) -> Packed:
    """Pack a weight of shape (rows, channels, *kernel). `kept` is its mask.

    Blocks that keep fewer than two weights are filled up with zeros. The metadata depends only on the mask.

    >>> weight = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    >>> packed = pack(weight, weight != 0)
    >>> packed.values[0, 0, 0, :2].tolist(), int(packed.metadata[0, 0, 0]) & 0b1111
    ([1.0, 2.0], 12)
    >>> torch.equal(unpack(packed), weight)
    True
    """
    if weight.shape != kept.shape or weight.dim() < 2:
        raise MaskError(
            f"weight and mask must have the same shape with two or more dimensions, got {tuple(weight.shape)} and "
            f"{tuple(kept.shape)}"
        )
    flags = _blocks(_matrix(kept.to(torch.uint8)))
    if int(flags.sum(-1).max()) > 2:
        raise MaskError("the mask must be 2:4: a block of four input channels keeps more than two weights")
    places = flags.sort(dim=-1, descending=True, stable=True).indices[..., :2].sort(dim=-1).values
    blocks = _blocks(_matrix(torch.where(kept, weight, torch.zeros((), dtype=weight.dtype, device=weight.device))))
    values = blocks.gather(-1, places).flatten(1)  # (rows, K / 2)
    nibbles = (places[..., 0] | places[..., 1] << 2).long()  # (rows, K / 4)
    return Packed(_lay_values(values), _lay_metadata(nibbles), tuple(weight.shape))


def packed_shapes(shape: Sequence[int], sparse: bool) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shapes of the values and of the metadata of a packed weight.

    >>> packed_shapes((17, 68, 3, 3), sparse=True), packed_shapes((16, 64), sparse=False)
    (((2, 36, 32, 8), (2, 18, 32)), ((1, 4, 32, 8), None))
    """
    rows, channels, *kernel = shape
    tiles, steps = -(-rows // ROWS), math.prod(kernel) * -(-channels // CHANNELS)
    return (tiles, steps * (2 if sparse else 4), _LANES, 8), (tiles, steps, _LANES) if sparse else None


def unpack(packed: Packed) -> Tensor:
    """Restore the weight, including its zeros."""
    values, nibbles = _read_values(packed.values), _read_metadata(packed.metadata)
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)
    blocks = torch.zeros(*nibbles.shape, 4, dtype=values.dtype, device=values.device)
    blocks.scatter_(-1, places, values.reshape(*nibbles.shape, 2))
    return _weight(blocks.flatten(1), packed.shape)


def pack_dense(weight: Tensor) -> Tensor:
    """Pack a weight for the dense baseline of the kernel: (row tiles, steps of 16 columns, lanes, 8).

    >>> pack_dense(torch.arange(8.0).reshape(1, 8))[0, 0, 1, :2].tolist()
    [2.0, 3.0]
    """
    return _lay_values(_matrix(weight))


def unpack_dense(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Restore the weight, given its shape.

    >>> weight = torch.arange(24.0).reshape(2, 3, 2, 2)
    >>> torch.equal(unpack_dense(pack_dense(weight), (2, 3, 2, 2)), weight)
    True
    """
    return _weight(_read_values(values), shape)


def restored(values: Tensor, metadata: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Restore the weight from either packed form: 2:4 with metadata, dense without."""
    return unpack_dense(values, shape) if metadata is None else unpack(Packed(values, metadata, shape))


def _weight(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(padded rows, K) -> (rows, channels, *kernel)."""
    rows, channels, *kernel = shape
    parts = matrix.reshape(len(matrix), -1, _padded(channels, CHANNELS))[:rows, :, :channels]
    return parts.transpose(1, 2).reshape(rows, channels, *kernel)


def _matrix(weight: Tensor) -> Tensor:
    """(rows, channels, *kernel) -> (padded rows, K), K = (kernel position, padded channel)."""
    rows, channels = weight.shape[:2]
    x = weight.reshape(rows, channels, -1).transpose(1, 2)
    x = F.pad(x, (0, _padded(channels, CHANNELS) - channels, 0, 0, 0, _padded(rows, ROWS) - rows))
    return x.flatten(1)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _blocks(matrix: Tensor) -> Tensor:
    return matrix.reshape(len(matrix), -1, 4)


def _lay_values(values: Tensor) -> Tensor:
    parts = values.reshape(len(values) // 16, 2, 8, -1, 2, 4, 2)  # tile, half, g, step, side, q, pair
    return parts.permute(0, 3, 2, 5, 4, 1, 6).reshape(parts.shape[0], parts.shape[3], _LANES, 8)


def _read_values(packed: Tensor) -> Tensor:
    tiles, steps = packed.shape[:2]
    parts = packed.reshape(tiles, steps, 8, 4, 2, 2, 2)  # tile, step, g, q, side, half, pair
    return parts.permute(0, 5, 2, 1, 4, 3, 6).reshape(tiles * 16, steps * 16)


def _lay_metadata(nibbles: Tensor) -> Tensor:
    parts = nibbles.reshape(len(nibbles) // 16, 2, 8, -1, 4, 4)  # tile, half, g, step of 64, q, block
    shifts = _shifts(nibbles.device).reshape(1, 2, 1, 1, 1, 4)
    words = (parts << shifts).sum((1, 5))  # tile, g, step, q
    words = words.permute(0, 2, 1, 3).reshape(parts.shape[0], parts.shape[3], _LANES)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _read_metadata(metadata: Tensor) -> Tensor:
    tiles, steps = metadata.shape[:2]
    words = (metadata.long() & 0xFFFFFFFF).reshape(tiles, steps, 8, 4)  # tile, step, g, q
    shifts = _shifts(metadata.device).reshape(2, 1, 1, 1, 1, 4)
    parts = words[None, ..., None] >> shifts & 15  # half, tile, step, g, q, block
    return parts.permute(1, 0, 3, 2, 4, 5).reshape(tiles * 16, steps * 16)


def _shifts(device: torch.device) -> Tensor:
    """The bit offset of each (half, block) in a word."""
    return 16 * torch.arange(2, device=device)[:, None] + 4 * torch.arange(4, device=device)
