"""Memory for machine code, never writable and executable at once, and memory in huge pages for weights."""

import contextlib
import ctypes
import functools
import mmap
import sys

import numpy as np

from halve.engine.kernels.cpu_sp.assembler import Assembler, Bytes
from halve.errors import EngineError

_HUGE = 2 << 20  # bytes of a huge page
_LEAST_HUGE = _HUGE // 2  # smaller blocks would waste most of a huge page
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
