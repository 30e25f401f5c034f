"""Certificates: a statement, what it assumes, what it was computed from, and the result.

A certificate is a JSON file. Its checksum finds damage; whether it is true is found by computing it again, which
`halve.certify(..., check=FILE)` does.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from halve.errors import FileError
from halve.masks.storage import check_json, read_bytes, write_atomically
from halve.version import VERSION

FORMAT, FORMAT_VERSION = "halve.certificate", 1
SUFFIX = ".certificate.json"
_MAX_BYTES = 1 << 28
_KEYS = ("format", "version", "sentence", "statement", "settings", "assumptions", "result", "digests", "made_with")


@dataclass(frozen=True)
class Certificate:
    """A proven statement. `print(certificate)` says it in one sentence.

    Args:
        statement: Which statement it is: "flips", "comparison", "region", "reuse", "agreement" or "worst mask".
        sentence: The statement with its numbers, in words.
        settings: What was asked for.
        assumptions: What the statement rests on.
        result: The bound and the counts or margins that it follows from.
        digests: SHA-256 of the weights, the masks and the inputs.
        made_with: Versions of halve and torch.

    >>> import halve
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    >>> certificate = halve.certify(model, halve.prune(model, pattern="4:4"), torch.randn(700, 8))
    >>> print(certificate)
    With 99.9 % confidence, masked and dense network predict the same class for at least 99.01 % of images like these \
(0 of 700 differed).
    """

    statement: str
    sentence: str
    settings: Mapping[str, Any]
    assumptions: tuple[str, ...]
    result: Mapping[str, Any]
    digests: Mapping[str, str]
    made_with: Mapping[str, str] = field(default_factory=lambda: {"halve": VERSION, "torch": str(torch.__version__)})

    def __str__(self) -> str:
        return self.sentence

    def as_json(self) -> dict[str, Any]:
        """The certificate as plain values, with its checksum."""
        plain = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "sentence": self.sentence,
            "statement": self.statement,
            "settings": dict(self.settings),
            "assumptions": list(self.assumptions),
            "result": dict(self.result),
            "digests": dict(self.digests),
            "made_with": dict(self.made_with),
        }
        return plain | {"sha256": _checksum(plain)}

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the certificate to a JSON file, customarily `NAME.certificate.json`, atomically.

        Args:
            path: File to write. An older certificate is replaced; anything else is not.
            force: Replace an existing file, whatever it is. Default: False.
        """
        path = Path(path)
        if not force and path.is_file() and path.stat().st_size and not is_certificate(path):
            raise FileError(
                f"cannot write {path}: the file exists and is not a certificate; choose another path, or replace it "
                f"with force=True"
            )
        text = json.dumps(self.as_json(), indent=2, allow_nan=False, ensure_ascii=False)
        return write_atomically(path, f"{text}\n".encode())

    @classmethod
    def load(cls, path: str | Path) -> "Certificate":
        """Read a certificate. Raises `FileError` if it was changed since it was written."""
        found = _read(Path(path))
        if found.keys() != {*_KEYS, "sha256"} or not _has_types(found):
            raise FileError(f"{path} is damaged: a certificate has the keys {', '.join(_KEYS)} and sha256")
        if found["version"] != FORMAT_VERSION:
            raise FileError(f"{path} is a certificate of version {found['version']}; halve reads {FORMAT_VERSION}")
        if found.pop("sha256") != _checksum(found):
            raise FileError(f"{path} was changed after it was written: its checksum does not match")
        values = {key: found[key] for key in _KEYS[2:]}
        return cls(**values | {"assumptions": tuple(found["assumptions"])})


def is_certificate(path: Path) -> bool:
    """Whether a file says that it is a certificate."""
    try:
        return _read(path).get("format") == FORMAT
    except FileError:
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(path, _MAX_BYTES))
        check_json(found)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a certificate: it is not valid JSON") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileError(f"{path} is not a certificate: 'halve certify --out' writes them")
    return found


def _has_types(found: Mapping[str, Any]) -> bool:
    texts = [found["sentence"], found["statement"], *_items(found["assumptions"]), *_items(found["digests"])]
    objects = [found[key] for key in ("settings", "result", "digests", "made_with")]
    return (
        isinstance(found["assumptions"], list)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(one, dict) for one in objects)
    )


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _checksum(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()
