"""Run machine code on PyTorch's own threads: those of the OpenMP library that PyTorch has loaded."""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True  # OpenMP's threads do not exist in the child: waiting for them would take forever


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, argument, threads, flags)` of PyTorch's OpenMP library; None if it has another.

    Symbols are looked up as for PyTorch: in the process first, then in PyTorch's libraries and those they need. The
    OpenMP libraries of GCC, LLVM and Intel have this function.
    """
    for path in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            function = ctypes.CDLL(None if path is None else str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


@functools.lru_cache(64)
def _alone(worker: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(worker)


def run(worker: int, argument: int, threads: int) -> None:
    """Call the function at address `worker` from each of several threads. Other Python threads run meanwhile."""
    parallel = _gomp_parallel() if threads > 1 and not _forked else None
    if parallel is None:
        _alone(worker)(argument)
    else:
        parallel(worker, argument, threads, 0)
