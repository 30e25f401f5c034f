"""Bit streams of small integers: how files store codes and the indices of kept weights (docs/file-format.md)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halve.errors import FileError


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack small integers into a stream of `bits` bits each, lowest bit first, zero-padded to whole bytes.

    >>> unpack_bits(pack_bits(torch.tensor([5, 0, 3]), bits=3), count=3, bits=3).tolist()
    [5, 0, 3]
    """
    flat = values.reshape(-1).numpy().astype(np.uint16)
    planes = (flat[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
    return torch.from_numpy(np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little"))


def unpack_bits(stream: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of `pack_bits`, as int64. Raises if the length is wrong or a padding bit is set."""
    if stream.dtype != torch.uint8 or stream.dim() != 1 or stream.numel() != -(-count * bits // 8):
        raise FileError(f"expected {-(-count * bits // 8)} bytes for {count} values of {bits} bits")
    planes: NDArray[np.uint8] = np.unpackbits(stream.numpy(), bitorder="little")
    if planes[count * bits :].any():
        raise FileError("the padding bits after the last value must be 0")
    flat = np.zeros(count, np.int64)
    for bit in range(bits):
        flat |= planes[bit : count * bits : bits].astype(np.int64) << bit
    return torch.from_numpy(flat)
