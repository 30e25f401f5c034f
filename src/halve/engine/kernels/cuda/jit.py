"""Compile CUDA source with the NVRTC that ships with PyTorch, and cache the result on disk.

Kernels are compiled to cubins, since older drivers reject the PTX of newer compilers. The cache key is a hash of the
source, flags and compiler version. Files are written atomically, so processes may share the cache; processes that need
the same kernel at once wait for the one that compiles it. Each file starts with a digest of its contents; damaged files
are compiled again.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import site
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch

from halve.errors import EngineError, FileError
from halve.locks import locked
from halve.masks.storage import write_atomically

_DIGEST = 32  # bytes
_OPTIONS = ("--std=c++17", "-lineinfo")
_LONGEST_WAIT = 120.0  # seconds that a kernel may take another process


def cubin(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Compile source for an architecture such as "sm_90a", or load it from the cache.

    Raises `EngineError` with the compiler log if the source does not compile, or if there is no compiler.
    """
    flags = (f"--gpu-architecture={architecture}", *_OPTIONS, *options)
    path = cache_dir() / f"{_key(source, flags)}.cubin"
    cached = _cached(path)
    if cached is not None:
        return cached
    lock = path.with_suffix(".lock")
    with locked(lock, _LONGEST_WAIT):
        cached = _cached(path)  # another process may have compiled it meanwhile
        if cached is not None:
            return cached
        try:
            code = _compiled(source, flags)
            with contextlib.suppress(OSError, FileError):  # full or read-only: not cached
                write_atomically(path, hashlib.sha256(code).digest() + code)
            return code
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()  # whoever waits for it still gets it, and then finds the kernel


def _cached(path: Path) -> bytes | None:
    """The kernel in a file of the cache; None if it is missing or damaged."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    return found[_DIGEST:] if hashlib.sha256(found[_DIGEST:]).digest() == found[:_DIGEST] else None


def source(package: str, name: str) -> str:
    """CUDA source from a file of a kernel family, after what all of them share (`elements.cu`)."""
    shared = resources.files(__package__).joinpath("elements.cu").read_text()
    return shared + resources.files(package).joinpath(name).read_text()


def version() -> tuple[int, int]:
    """The version of NVRTC, as (major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def unavailable() -> str | None:
    """Why kernels cannot be compiled; None if they can."""
    try:
        version()
    except EngineError as error:
        return str(error)
    return None


def digest(*parts: str) -> str:
    """A short digest of strings, for versions and cache keys."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _key(source: str, flags: Sequence[str]) -> str:
    parts = ("halve", *map(str, version()), *flags, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cache_dir() -> Path:
    """The directory for compiled kernels and timings: $HALVE_CACHE, or halve/kernels in the user's cache."""
    if chosen := os.environ.get("HALVE_CACHE"):
        return Path(chosen)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home directory, as in some containers
        base = Path(tempfile.gettempdir()) / f"cache-{getattr(os, 'getuid', int)()}"
    return base / "halve" / "kernels"


def _compiled(source: str, flags: Sequence[str]) -> bytes:
    library = _library()
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"halve.cu", 0, None, None)
    _check(made, "nvrtcCreateProgram")
    try:
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        result = library.nvrtcCompileProgram(program, len(flags), given)
        if result:
            log = _text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace").strip("\0\n ")
            raise EngineError(f"kernel does not compile for {flags[0].partition('=')[2]}: {log or _name(result)}")
        return _text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), size_of)(program, ctypes.byref(size)), size_of)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), get)(program, buffer), get)
    return buffer.raw


def _check(result: int, what: str) -> None:
    if result:
        raise EngineError(f"{what} failed: {_name(result)}")


def _name(result: int) -> str:
    explain = _library().nvrtcGetErrorString
    explain.restype = ctypes.c_char_p
    text: bytes | None = explain(result)
    return text.decode() if text else f"error {result}"


@functools.cache
def _library() -> ctypes.CDLL:
    """Load NVRTC: by name, or from the folders of PyTorch and of the nvidia packages."""
    major = (torch.version.cuda or "13").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"] if sys.platform != "win32" else [f"nvrtc64_{major}0_0.dll"]
    roots = [Path(torch.__file__).parent / "lib", *(Path(folder) / "nvidia" for folder in _packages())]
    files = [str(file) for root in roots for name in names if root.is_dir() for file in sorted(root.rglob(name))]
    for candidate in (*names, *files):
        try:
            return ctypes.CDLL(candidate)
        except OSError:  # missing, or built for another platform
            continue
    raise EngineError(
        f"cannot find NVRTC ({names[0]}), which compiles kernels: install a CUDA build of PyTorch, which includes it"
    )


def _packages() -> list[str]:
    return list(dict.fromkeys([str(Path(torch.__file__).parent.parent), *site.getsitepackages()]))
