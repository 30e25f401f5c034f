"""Safetensors files that are written whole or not at all, and read with suspicion.

Both of halve's file types use the same envelope, specified byte by byte in docs/file-format.md: an ordinary safetensors
file whose metadata holds `format`, `version`, `header` (JSON) and `sha256` over everything else. Loading never runs
code, never allocates more than a small multiple of the file's size, and raises `FileError` for what is not as written.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from halve.errors import FileError, listed

VERSION = 1
MAX_BYTES = 1 << 36  # 64 GiB: no convolutional network comes near
MAX_HEADER = 100_000_000  # safetensors' own limit


def write(path: str | Path, format_: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write the envelope atomically and return the path."""
    try:
        text = json.dumps(header, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"cannot write {path}: the header holds what JSON cannot: {error}") from error
    metadata = {"format": format_, "version": str(VERSION), "header": text}
    return write_atomically(path, _serialised(path, tensors, metadata))


def _serialised(path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    if odd := [
        name for name, t in tensors.items() if t.is_meta or t.dtype == torch.complex128 or t.layout != torch.strided
    ]:
        kinds = [f"{name} ({tensors[name].dtype}, {tensors[name].layout}, {tensors[name].device.type})" for name in odd]
        raise FileError(f"cannot write {path}: only dense real tensors can be stored, not {listed(kinds)}")
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    return safetensors.torch.save(plain, metadata | {"sha256": _checksum(metadata, plain)})


def write_atomically(path: str | Path, content: bytes) -> Path:
    """Write beside the path, flush to disk, then rename: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    if not path.name or "\0" in str(path):
        raise FileError(f"cannot write {str(path)!r}: it names no file")
    sibling = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(os.open(sibling, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(sibling, path)
    except OSError as error:
        hint = "free some space or choose another folder" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check it"
        raise FileError(f"cannot write {path}: {error.strerror or error}; nothing was written, {hint}") from error
    finally:
        with contextlib.suppress(OSError):
            sibling.unlink()
    return path


def read(path: str | Path, formats: Iterable[str]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Read and check an envelope of one of `formats` -> (format, header, tensors)."""
    path, formats = Path(path), tuple(formats)
    content = read_bytes(path)
    metadata = _metadata(path, content)
    if metadata.get("format") not in formats:
        raise FileError(
            f"{path} is a safetensors file but not one of {' or '.join(formats)}; 'halve prune' writes mask files, "
            f"'halve pack' packed checkpoints"
        )
    if metadata.get("version") != str(VERSION):
        raise FileError(
            f"{path} has format version {metadata.get('version')!r}, this halve reads {VERSION}: upgrade halve"
        )
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if _checksum(metadata, tensors) != metadata.get("sha256"):
        raise FileError(f"{path} is damaged: its checksum does not fit its content; write or copy it again")
    header = _json(path, metadata.get("header", ""))
    if not isinstance(header, dict):
        raise FileError(f"{path} is damaged: its header is no JSON object")
    return metadata["format"], header, tensors


def format_of(path: str | Path) -> str | None:
    """The `format` in a safetensors file's metadata, '' where it names none; None where it is no safetensors file."""
    path = Path(path)
    content = read_bytes(path, 8)
    length = struct.unpack("<Q", content)[0] if len(content) == 8 else 0
    try:
        return _metadata(path, read_bytes(path, 8 + length)).get("format", "") if length <= MAX_HEADER else None
    except FileError:
        return None


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file of a plausible size, or its beginning."""
    try:
        if not path.is_file():
            raise FileError(f"{path}: no such file" if not path.exists() else f"{path} is no regular file")
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
        raise FileError(f"{path} is no safetensors file, or was cut short")
    try:
        text = content[8 : 8 + length].decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no safetensors file: {error}") from error
    header = _json(path, text)
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError(f"{path} is no safetensors file, or is damaged: its header has no usable metadata")
    return metadata


def _json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice")
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: its header cannot be read ({error})") from error


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    state = hashlib.sha256()
    for key in ("format", "version", "header"):
        state.update(f"{key}={metadata.get(key, '')}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
