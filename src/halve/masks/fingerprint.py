"""Fingerprints: recognise the weight that a mask was made for without storing it.

Two digests say whether the weight, dense or masked, is still the same bit for bit. A sketch of each, 128 numbers, says
how large an update was: a sketch is linear in the weight, so the difference of two sketches is the sketch of the
difference, and its norm estimates the norm of the difference (standard error about 6 %, of a ratio about 9 %).
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SKETCH = 128
_MAX = float(np.finfo(np.float32).max)
_CHUNK = 1 << 20  # a multiple of SKETCH


@dataclass(frozen=True)
class Fingerprint:
    """Digests and sketches of a weight before and after masking.

    >>> weight = torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> print_ = Fingerprint.of(weight, weight.clamp(min=0))
    >>> print_.dense == digest(weight), print_.dense == digest(weight + 1e-3)
    (True, False)
    >>> 0.008 < print_.update(weight * 1.01) < 0.012
    True
    """

    dense: str
    masked: str
    sketch: tuple[float, ...]  # of the dense weight
    masked_sketch: tuple[float, ...]

    @classmethod
    def of(cls, weight: Tensor, masked: Tensor) -> "Fingerprint":
        return cls(digest(weight), digest(masked), _numbers(weight), _numbers(masked))

    def update(self, weight: Tensor) -> float:
        """Estimate ||weight - old|| / ||old||, where old is the dense or the masked weight, whichever is closer."""
        now = sketch(weight)
        return min(_relative(now, np.asarray(old)) for old in (self.sketch, self.masked_sketch))


def _numbers(weight: Tensor) -> tuple[float, ...]:
    return tuple(np.clip(sketch(weight), -_MAX, _MAX).astype(np.float32).tolist())


def _relative(now: NDArray[np.float64], old: NDArray[np.float64]) -> float:
    norm, step = float(np.linalg.norm(old)), float(np.linalg.norm(now - old))
    return step / norm if norm else float("inf") if step else 0.0


def digest(weight: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes, in hexadecimal."""
    plain = weight.detach().cpu().clone(memory_format=torch.contiguous_format)
    state = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}\n".encode())
    state.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def sketch(weight: Tensor) -> NDArray[np.float64]:
    """Signed sums of every 128th weight, with signs from a fixed hash of the position."""
    flat = weight.detach().cpu().double().reshape(-1).numpy()
    total = np.zeros(SKETCH)
    if not np.isfinite(flat).all():
        return total + np.nan
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        signed = np.pad(part * _signs(start, part.size), (0, -part.size % SKETCH))
        total += signed.reshape(-1, SKETCH).sum(0)
    return total


def _signs(start: int, count: int) -> NDArray[np.float64]:
    """+1 or -1 for each position, from the splitmix64 finaliser: the same on every machine and version."""
    x = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return 1.0 - 2.0 * ((x ^ (x >> np.uint64(31))) & np.uint64(1)).astype(np.float64)
