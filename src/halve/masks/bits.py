"""Bit streams of small integers: codes and indices of kept weights in files (docs/reference/file-formats.md)."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halve.errors import FileError

CHUNK = 1 << 18  # values unpacked at a time, to bound the memory


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack small integers into a stream of `bits` bits each, lowest bit first, zero-padded to whole bytes.

    >>> unpack_bits(pack_bits(torch.tensor([5, 0, 3]), bits=3), count=3, bits=3).tolist()
    [5, 0, 3]
    """
    flat = values.reshape(-1).numpy().astype(np.uint16)
    planes = (flat[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
    return torch.from_numpy(np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little"))


def unpack_bits(stream: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """The inverse of `pack_bits`. Raises if the length is wrong or a padding bit is set."""
    chunks = unpacked_chunks(stream, count, bits)
    flat, start = torch.empty(count, dtype=dtype), 0
    for chunk in chunks:
        flat[start : start + len(chunk)] = chunk
        start += len(chunk)
    return flat


def unpacked_chunks(stream: Tensor, count: int, bits: int, group: int = 1) -> Iterator[Tensor]:
    """Unpack about `CHUNK` values at a time, as int32: groups of `group` values are not cut.

    The length is checked at once, the padding with the last chunk.
    """
    if stream.dtype != torch.uint8 or stream.dim() != 1 or stream.numel() != -(-count * bits // 8):
        raise FileError(f"expected {-(-count * bits // 8)} bytes for {count} values of {bits} bits")
    # A multiple of 8 values is a whole number of bytes.
    return _chunks(stream.numpy(), count, bits, 8 * group * max(1, CHUNK // (8 * group)))


def _chunks(stream: NDArray[np.uint8], count: int, bits: int, most: int) -> Iterator[Tensor]:
    for start in range(0, count, most):
        size = min(most, count - start)
        first = start * bits // 8
        planes: NDArray[np.uint8] = np.unpackbits(stream[first : first + -(-size * bits // 8)], bitorder="little")
        if planes[size * bits :].any():
            raise FileError("the padding bits after the last value must be 0")
        values = np.zeros(size, np.int32)
        for bit in range(bits):
            values |= planes[bit : size * bits : bits].astype(np.int32) << bit
        yield torch.from_numpy(values)
