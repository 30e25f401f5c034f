"""Small integers as streams of bits: how codes and places of kept weights lie in files (docs/file-format.md)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halve.errors import FileError


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Small integers -> a dense stream of `bits` bits each, lowest bit first, the last byte filled with zeros.

    >>> unpack_bits(pack_bits(torch.tensor([5, 0, 3]), bits=3), count=3, bits=3).tolist()
    [5, 0, 3]
    """
    flat = values.reshape(-1).numpy().astype(np.uint16)
    planes = (flat[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
    return torch.from_numpy(np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little"))


def unpack_bits(stream: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of `pack_bits`, as int64; refuses a stream of another length or with stray bits."""
    if stream.dtype != torch.uint8 or stream.dim() != 1 or stream.numel() != -(-count * bits // 8):
        raise FileError(f"expected {-(-count * bits // 8)} bytes for {count} values of {bits} bits")
    planes: NDArray[np.uint8] = np.unpackbits(stream.numpy(), bitorder="little")
    if planes[count * bits :].any():
        raise FileError("stray bits after the last value")
    flat = np.zeros(count, np.int64)
    for bit in range(bits):
        flat |= planes[bit : count * bits : bits].astype(np.int64) << bit
    return torch.from_numpy(flat)
