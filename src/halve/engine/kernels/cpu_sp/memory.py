"""Memory for machine code, never writable and executable at once, and memory in huge pages for weights and images."""

import contextlib
import ctypes
import functools
import mmap
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halve.engine.kernels.cpu_sp.assembler import Assembler, Bytes
from halve.engine.kernels.planes import strides_of
from halve.errors import EngineError

_HUGE = 2 << 20  # bytes of a huge page
_LEAST_HUGE = _HUGE // 2  # smaller blocks would waste most of a huge page
_LEAST_REUSED = 1 << 20  # bytes of a tensor: PyTorch's allocator is quick for smaller ones
_MOST_FREE = 16  # blocks that are kept to be used again
_READ_AND_EXECUTE = 1 | 4  # PROT_READ | PROT_EXEC, which Python's mmap module has on Linux alone


class Block:
    """Zeroed memory, aligned to pages; in huge pages if it is large, as a kernel reads all of it once per call."""

    def __init__(self, size: int) -> None:
        huge = size >= _LEAST_HUGE
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.size + (_HUGE if huge else 0), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        offset = -start % _HUGE if huge else 0
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without huge pages: small ones are slower, nothing else
                self._map.madvise(mmap.MADV_HUGEPAGE, offset, self.size)
        self.address = start + offset
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8, size, offset)


class Executable(Block):
    """Machine code. It is written first, then made executable and read-only."""

    def __init__(self, code: Bytes) -> None:
        super().__init__(len(code))
        self.bytes[:] = code
        self.bytes.flags.writeable = False
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), _READ_AND_EXECUTE):
            raise EngineError(f"the system refuses executable memory (errno {ctypes.get_errno()} from mprotect)")


_free: deque[Block] = deque()  # the memory of tensors that are gone


class _Lease(np.ndarray[Any, Any]):
    """The memory of a tensor, which holds it. Its block is free again when the tensor is gone."""

    block: Block

    def __del__(self) -> None:
        if isinstance(getattr(self, "block", None), Block):
            _free.append(self.block)
            if len(_free) > _MOST_FREE:
                _free.popleft()


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor of this many numbers, not initialised.

    Large ones are in huge pages, in memory that is used again: the system's allocator would return it after each layer,
    and clearing new pages takes longer than many layers.
    """
    size = count * dtype.itemsize
    if size < _LEAST_REUSED:
        return torch.empty(count, dtype=dtype)
    block = _taken(size) or Block(-(-size // _HUGE) * _HUGE)
    lease = block.bytes[:size].view(_Lease)
    lease.block = block
    return torch.from_numpy(lease).view(dtype)


def new_planes(shape: Sequence[int], channel_dim: int, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape, not initialised, stored as planes; see `empty`."""
    strides, count = strides_of(shape, channel_dim)
    return empty(count, dtype).as_strided(tuple(shape), strides)


def _taken(size: int) -> Block | None:
    """A free block of this size or a little more. The most recently used one, which may still be in the cache."""
    for block in reversed([*_free]):
        if size <= block.size <= 2 * size + _HUGE:
            try:
                _free.remove(block)
            except ValueError:  # another thread took it
                continue
            return block
    return None


@functools.cache
def unavailable() -> str | None:
    """Why machine code cannot be run here; None if it can. Tries it once."""
    if sys.platform != "linux":
        return f"machine code is emitted on Linux only, this is {sys.platform}"
    a = Assembler()
    a.mov_immediate(0, 42)
    a.ret()
    try:
        block = Executable(np.frombuffer(bytes(a.code), np.uint8))
    except (EngineError, OSError) as error:
        return str(error)
    answer = ctypes.CFUNCTYPE(ctypes.c_int64)(block.address)()
    return None if answer == 42 else "a test of executable memory failed"
