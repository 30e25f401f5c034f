"""The envelope of halve's files: safetensors, written atomically and read with suspicion.

Mask files, packed checkpoints and run states share this envelope (docs/reference/file-formats.md, byte by byte): an
ordinary safetensors file whose metadata holds `format`, `version`, `header` (JSON) and `sha256` over everything else.
Reading never runs code, takes at most 64 times the file's size plus 100 MB of memory, and raises `FileError` for
anything that is not exactly as written.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from halve.errors import FileError, listed

MAX_BYTES = 1 << 36  # 64 GiB: far beyond any convolutional network
MAX_HEADER = 100_000_000  # safetensors' own limit
MAX_DEPTH = 32  # nested lists and objects in a header


@dataclass(frozen=True)
class Format:
    """A kind of file with its own version number.

    `kind` and `made_by` are for messages: what the file is called, and how to make a new one.
    """

    name: str
    version: int
    kind: str
    made_by: str


def write(
    path: str | Path,
    format_: Format,
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    force: bool = False,
) -> Path:
    """Write an envelope atomically and return its path. Only a file of the same format is replaced, unless forced."""
    if not force:
        _check_old(Path(path), format_)
    try:
        metadata = _metadata_of(format_, header)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"cannot write {path}: the header is not valid JSON: {error}") from error
    return write_atomically(path, _serialised(path, tensors, metadata))


def checksum(format_: Format, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The sha256 that an envelope with this content has in its metadata."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return _checksum(_metadata_of(format_, header), plain)


def _metadata_of(format_: Format, header: Mapping[str, Any]) -> dict[str, str]:
    check_json(header)
    text = json.dumps(header, allow_nan=False, ensure_ascii=False)
    return {"format": format_.name, "version": str(format_.version), "header": text}


def _check_old(path: Path, format_: Format) -> None:
    """Raise `FileError` if there is a file that is write-protected or not of this format: it may be a checkpoint."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # no such file, or no such name, which writing reports
        return
    if not stat.S_ISREG(status.st_mode):
        return
    if not status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        why = "it is write-protected"
    elif status.st_size and format_of(path) != format_.name:
        why = f"the file exists and is not a {format_.kind}"
    else:
        return
    raise FileError(f"cannot write {path}: {why}; choose another path, or replace it with force=True")


def _serialised(path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    if odd := [
        name for name, t in tensors.items() if t.is_meta or t.dtype == torch.complex128 or t.layout != torch.strided
    ]:
        kinds = [f"{name} ({tensors[name].dtype}, {tensors[name].layout}, {tensors[name].device.type})" for name in odd]
        raise FileError(f"cannot write {path}: only dense real tensors can be stored, got {listed(kinds)}")
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    return safetensors.torch.save(plain, metadata | {"sha256": _checksum(metadata, plain)})


def write_atomically(path: str | Path, content: bytes) -> Path:
    """Write to a sibling file, flush, then rename: a reader sees the old file or the new one, never a part.

    Symbolic links are followed, and the permissions of an existing file are kept.
    """
    path = Path(path)
    if not path.name or "\0" in str(path):
        raise FileError(f"cannot write {str(path)!r}: it is not a file name")
    target = Path(os.path.realpath(path))
    sibling = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
    try:
        mode = _mode_of(target)
        with open(os.open(sibling, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # some file systems have no permissions
                    os.chmod(sibling, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(sibling, target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space or choose another folder" if full else "check the path and its permissions"
        raise FileError(f"cannot write {path}: {error.strerror or error}; nothing was written, {hint}") from error
    finally:
        with contextlib.suppress(OSError):
            sibling.unlink()
    return path


def remove_parts(path: str | Path) -> None:
    """Remove what writers of a file that were killed left behind. Nobody else may be writing the file."""
    target = Path(os.path.realpath(path))
    part = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}\.part")
    for sibling in target.parent.iterdir():
        if part.fullmatch(sibling.name):
            with contextlib.suppress(OSError):
                sibling.unlink()


def _mode_of(path: Path) -> int | None:
    """The permissions of a regular file; None if there is no file. Raises `OSError` for anything else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):  # a folder, a device, or a link to itself
        raise OSError(errno.EINVAL, "it is not a regular file")
    return stat.S_IMODE(mode)


def read(path: str | Path, formats: Iterable[Format]) -> tuple[Format, dict[str, Any], dict[str, Tensor]]:
    """Read and check an envelope in one of `formats`; returns its format, header and tensors."""
    path = Path(path)
    content = read_bytes(path)
    metadata = _metadata(path, content)
    format_ = _format_in(path, metadata, tuple(formats))
    try:
        tensors = safetensors.torch.load(content)
        checksum = _checksum(metadata, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if checksum != metadata.get("sha256"):
        raise FileError(f"{path} is damaged: its checksum does not match its content; copy it or make it again")
    header = _json(path, metadata.get("header", ""))
    if not isinstance(header, dict):
        raise FileError(f"{path} is damaged: its header is not a JSON object")
    return format_, header, tensors


def _format_in(path: Path, metadata: Mapping[str, str], formats: tuple[Format, ...]) -> Format:
    """The format that the metadata names, if it is one of `formats` and of the version that this halve reads."""
    format_ = next((known for known in formats if known.name == metadata.get("format")), None)
    if format_ is None:
        kinds = " or ".join(known.kind for known in formats)
        hints = "; ".join(f"{known.made_by} writes a {known.kind}" for known in formats)
        raise FileError(f"{path} is a safetensors file, but not a {kinds}; {hints}")
    version = metadata.get("version", "")
    if version == str(format_.version):
        return format_
    if not version.isascii() or not version.isdigit() or len(version) > 9:
        raise FileError(f"{path} is damaged: its format version must be a number, got {version[:20]!r}")
    what = f"{path} is a {format_.kind} of format version {version}, this halve reads version {format_.version}"
    if int(version) > format_.version:
        raise FileError(f"{what}: it was made by a newer halve, upgrade halve to read it")
    raise FileError(f"{what}: it was made by an older halve, make it again with {format_.made_by}")


def format_of(path: str | Path) -> str | None:
    """The `format` in a safetensors file's metadata, '' if it has none; None if it is not a safetensors file."""
    metadata = metadata_of(path)
    return None if metadata is None else metadata.get("format", "")


def metadata_of(path: str | Path) -> dict[str, str] | None:
    """The metadata of a safetensors file; None if it is not one."""
    path = Path(path)
    content = read_bytes(path, 8)
    length = struct.unpack("<Q", content)[0] if len(content) == 8 else 0
    try:
        return _metadata(path, read_bytes(path, 8 + length)) if length <= MAX_HEADER else None
    except FileError:
        return None


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file of plausible size, or its first `most` bytes."""
    try:
        if not path.is_file():
            raise FileError(f"{path}: no such file" if not path.exists() else f"{path} is not a regular file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise FileError(f"{path} has {size:,} bytes, more than the {MAX_BYTES:,} that halve reads")
        with path.open("rb") as file:
            return file.read(size if most is None else min(size, most))
    except FileError:
        raise
    except (OSError, MemoryError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from error


def _metadata(path: Path, content: bytes) -> dict[str, str]:
    length = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    if not 2 <= length <= min(len(content) - 8, MAX_HEADER):
        raise FileError(f"{path} is not a safetensors file, or is truncated")
    try:
        text = content[8 : 8 + length].decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not a safetensors file: {error}") from error
    header = _json(path, text)
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError(f"{path} is not a safetensors file, or is damaged: its header has no usable metadata")
    return metadata


def _json(path: Path, text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("duplicate key")
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
        check_json(value)
        return value
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: its header cannot be read ({error})") from error


def check_json(value: Any) -> None:
    """Raise `ValueError` for JSON that is nested too deeply, and for text that is not Unicode."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"lists and objects may be nested {MAX_DEPTH} deep at most")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str) and not item.isascii():
                item.encode()  # raises for half a surrogate pair
            elif isinstance(item, Mapping):
                inner += item
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        level, depth = inner, depth + 1


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    state = hashlib.sha256()
    for key in ("format", "version", "header"):
        state.update(f"{key}={metadata.get(key, '')}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
