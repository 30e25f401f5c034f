"""CUDA source -> machine code for one architecture, with the NVRTC that comes with PyTorch; kept on disk by content.

The result is a cubin, never PTX: an older driver would refuse PTX of a newer compiler. Files are named by a hash of all
that decides them and written whole or not at all, so any number of processes may share the folder. A file begins with
a digest of the rest: one that is torn or damaged is compiled again.
"""

import ctypes
import functools
import hashlib
import os
import site
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from halve.errors import EngineError, FileError
from halve.masks.storage import write_atomically

_DIGEST = 32  # bytes
_OPTIONS = ("--std=c++17", "-lineinfo")


def cubin(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code for `architecture`, such as "sm_90a": from the disk if it was compiled before.

    Raises `EngineError` with the compiler's words where the source does not compile, or where there is no compiler.
    """
    flags = (f"--gpu-architecture={architecture}", *_OPTIONS, *options)
    path = folder() / f"{_key(source, flags)}.cubin"
    try:
        found = path.read_bytes()
        if hashlib.sha256(found[_DIGEST:]).digest() == found[:_DIGEST]:
            return found[_DIGEST:]
    except OSError:  # not there yet, or not readable: compile
        found = b""
    code = _compiled(source, flags)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, hashlib.sha256(code).digest() + code)
    except (OSError, FileError):  # a disk that is full or read-only costs time, not the result
        return code
    return code


def version() -> tuple[int, int]:
    """Of NVRTC."""
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
    """A short digest of texts, for versions and keys."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _key(source: str, flags: Sequence[str]) -> str:
    parts = ("halve", *map(str, version()), *flags, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def folder() -> Path:
    """Where compiled kernels and timings are kept: $HALVE_CACHE, or halve/kernels in the user's cache."""
    if chosen := os.environ.get("HALVE_CACHE"):
        return Path(chosen)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # nobody's home, as in some containers
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
            raise EngineError(f"a kernel does not compile for {flags[0].partition('=')[2]}: {log or _name(result)}")
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
    """PyTorch's own NVRTC: the one in memory, beside PyTorch, or wherever the system has it."""
    major = (torch.version.cuda or "13").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"] if sys.platform != "win32" else [f"nvrtc64_{major}0_0.dll"]
    roots = [Path(torch.__file__).parent / "lib", *(Path(folder) / "nvidia" for folder in _packages())]
    files = [str(file) for root in roots for name in names if root.is_dir() for file in sorted(root.rglob(name))]
    for candidate in (*names, *files):
        try:
            return ctypes.CDLL(candidate)
        except OSError:  # not there, or not for this machine: try the next
            continue
    raise EngineError(
        f"no NVRTC ({names[0]}) was found: kernels cannot be compiled, and the dense network runs instead; "
        f"a PyTorch build for CUDA brings it along"
    )


def _packages() -> list[str]:
    return list(dict.fromkeys([str(Path(torch.__file__).parent.parent), *site.getsitepackages()]))
