"""Pack weights for `wgmma`: blocks of 64 output channels by 64 channels of one tap, 2:4 or dense, losslessly.

The weight is padded with zeros to multiples of 64 output channels and 64 channels. Packed, it is a tensor of shape (row
blocks, chunks of channels, taps, elements of a block) in the dtype of the weight. Taps are in the order of `taps`.

A step of the tensor core takes 64 rows by 16 stored values: two steps of a 2:4 block, which keeps 32 of 64 columns,
four of a dense one. The values of a step are core matrices of 8 rows by 8 values: (row / 8, value / 8, row % 8,
value % 8).

After the values of a 2:4 block come 128 words of 32 bits of metadata, one per thread of a warpgroup. Word
32 w + 4 g + q describes columns 16 q .. 16 q + 15: bits 0-15 for row 16 w + g, bits 16-31 for row 16 w + g + 8. Each
block of four columns takes four bits: the indices of its two values, the first in the low two bits.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.engine.operations import Convolution
from halve.errors import EngineError

SIDE = 64  # rows and channels of a block
_METADATA = 256  # 16-bit elements in the metadata of a block
_VALUES = {True: SIDE * SIDE // 2, False: SIDE * SIDE}
BLOCK_BYTES = {True: 2 * (_VALUES[True] + _METADATA), False: 2 * _VALUES[False]}  # 2:4 or dense


def taps(convolution: Convolution) -> list[tuple[int, int]]:
    """The taps of the kernel in the order of the packed weight: (row, column).

    Taps of the same box follow each other: with stride 2, those of the even and odd rows and columns.

    >>> taps(Convolution(64, 64, (3, 3), (2, 2), (1, 1)))
    [(0, 0), (0, 2), (2, 0), (2, 2), (0, 1), (2, 1), (1, 0), (1, 2), (1, 1)]
    """
    (height, width), (down, across) = convolution.kernel, convolution.stride
    every = [(row, column) for row in range(height) for column in range(width)]
    return sorted(every, key=lambda tap: (tap[0] % down, tap[1] % across, tap))


def packed_shape(convolution: Convolution, sparse: bool) -> tuple[int, int, int, int]:
    """The shape of a packed weight.

    >>> packed_shape(Convolution(65, 64, (3, 3)), sparse=True), packed_shape(Convolution(64, 128), sparse=False)
    ((2, 1, 9, 2304), (1, 2, 1, 4096))
    """
    rows, channels = -(-convolution.rows // SIDE), -(-convolution.channels // SIDE)
    return rows, channels, math.prod(convolution.kernel), BLOCK_BYTES[sparse] // 2


def pack(weight: Tensor, convolution: Convolution) -> Tensor:
    """Pack a 2:4 weight of shape (rows, channels, height, width).

    >>> weight = torch.zeros(8, 8, 1, 1, dtype=torch.float16)
    >>> weight[:, 1::4], weight[:, 3::4] = 1, 2
    >>> packed = pack(weight, Convolution(8, 8))
    >>> packed.shape, packed[0, 0, 0, :4].tolist(), torch.equal(unpack(packed, Convolution(8, 8)), weight)
    (torch.Size([1, 1, 1, 2304]), [1.0, 2.0, 1.0, 2.0], True)
    """
    if weight.element_size() != 2:
        raise EngineError(f"the kernel needs float16 or bfloat16, got a weight in {weight.dtype}")
    blocks = _blocks(weight, convolution)  # (row blocks, chunks, taps, row, column)
    fours = blocks.reshape(*blocks.shape[:4], SIDE // 4, 4)
    places = (
        (fours != 0).to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :2].sort(dim=-1).values
    )
    values = _lay_values(fours.gather(-1, places).flatten(4))
    words = _lay_metadata(places[..., 0] | places[..., 1] << 2)
    return torch.cat([values, words.view(weight.dtype)], -1).contiguous()


def unpack(packed: Tensor, convolution: Convolution) -> Tensor:
    """Restore the weight from `pack`."""
    values = _read_values(packed[..., : _VALUES[True]])
    nibbles = _read_metadata(packed[..., _VALUES[True] :].contiguous().view(torch.int32))
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)
    fours = torch.zeros(*nibbles.shape, 4, dtype=packed.dtype, device=packed.device)
    fours.scatter_(-1, places, values.reshape(*nibbles.shape, 2))
    return _weight(fours.flatten(4), convolution)


def pack_dense(weight: Tensor, convolution: Convolution) -> Tensor:
    """Pack a dense weight, for the dense baseline of the kernel.

    >>> weight = torch.randn(8, 72, 3, 3)
    >>> conv = Convolution(8, 72, (3, 3), (2, 2))
    >>> torch.equal(unpack_dense(pack_dense(weight, conv), conv), weight)
    True
    """
    return _lay_values(_blocks(weight, convolution)).contiguous()


def unpack_dense(packed: Tensor, convolution: Convolution) -> Tensor:
    """Restore the weight from `pack_dense`."""
    return _weight(_read_values(packed), convolution)


def _order(convolution: Convolution) -> list[int]:
    """The index of each packed tap in the kernel."""
    return [row * convolution.kernel[1] + column for row, column in taps(convolution)]


def _blocks(weight: Tensor, convolution: Convolution) -> Tensor:
    """(rows, channels, height, width) -> (row blocks, chunks, taps, row, column)."""
    rows, channels = weight.shape[:2]
    x = _reordered(weight.reshape(rows, channels, -1), _order(convolution))
    x = F.pad(x, (0, 0, 0, -channels % SIDE, 0, -rows % SIDE))
    x = x.reshape(-(-rows // SIDE), SIDE, -(-channels // SIDE), SIDE, x.shape[-1])
    return x.permute(0, 2, 4, 1, 3)


def _weight(blocks: Tensor, convolution: Convolution) -> Tensor:
    x = blocks.permute(0, 3, 1, 4, 2)
    x = x.reshape(x.shape[0] * SIDE, x.shape[2] * SIDE, -1)[: convolution.rows, : convolution.channels]
    order = _order(convolution)
    return _reordered(x, [order.index(tap) for tap in range(len(order))]).reshape(convolution.weight_shape)


def _reordered(x: Tensor, order: list[int]) -> Tensor:
    """x[..., order], without a copy of the indices to the GPU, which could not be recorded."""
    return torch.stack([x[..., i] for i in order], -1)


def _lay_values(values: Tensor) -> Tensor:
    """(..., row, value) -> (..., element)."""
    parts = values.reshape(*values.shape[:3], 8, 8, -1, 2, 8)  # row / 8, row % 8, step, value / 8, value % 8
    return parts.permute(0, 1, 2, 5, 3, 6, 4, 7).flatten(3)


def _read_values(packed: Tensor) -> Tensor:
    parts = packed.reshape(*packed.shape[:3], -1, 8, 2, 8, 8)  # step, row / 8, value / 8, row % 8, value % 8
    return parts.permute(0, 1, 2, 4, 6, 3, 5, 7).reshape(*packed.shape[:3], SIDE, -1)


def _lay_metadata(nibbles: Tensor) -> Tensor:
    """(..., row, block of four columns) -> (..., word)."""
    parts = nibbles.reshape(*nibbles.shape[:3], 4, 2, 8, 4, 4)  # w, half, g, q, block
    words = (parts.long() << _shifts(nibbles.device)).sum((4, 7)).flatten(3)  # w, g, q
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _read_metadata(words: Tensor) -> Tensor:
    parts = (words.long() & 0xFFFFFFFF).reshape(*words.shape[:3], 4, 1, 8, 4, 1)
    return (parts >> _shifts(words.device) & 15).reshape(*words.shape[:3], SIDE, SIDE // 4)


def _shifts(device: torch.device) -> Tensor:
    """The bit offset of each (half, g, q, block) in a word."""
    half, block = torch.arange(2, device=device), torch.arange(4, device=device)
    return 16 * half[:, None, None, None] + 4 * block
