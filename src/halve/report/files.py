"""What a run leaves behind, read within bounds. A file may come from a stranger and hold anything."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halve.errors import FileError
from halve.masks.storage import check_json, read_bytes

_LARGEST = 64 << 20  # bytes of a JSON file or a log


def json_of(given: Any, what: str) -> Any:
    """JSON values from a file, from an object with `as_json`, or as they are.

    Args:
        given: A path, a result of halve, or JSON values.
        what: What it should be, for messages.
    """
    if hasattr(given, "as_json"):
        return given.as_json()
    if not isinstance(given, str | Path):
        return given
    try:
        found = json.loads(_content(Path(given)))
        check_json(found)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{given} is not {what}: it is not valid JSON") from error
    return found


def lines_of(path: str | Path) -> list[str]:
    """The lines of a text file."""
    try:
        return _content(Path(path)).decode().splitlines()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not a text file: {error}") from error


def _content(path: Path) -> bytes:
    content = read_bytes(path, _LARGEST + 1)
    if len(content) > _LARGEST:
        raise FileError(f"{path} has more than {_LARGEST >> 20} MiB, too much for a report")
    return content


def number(value: Any) -> float | None:
    """A finite number, or None for anything else.

    >>> number(2), number(True), number("2"), number(float("nan"))
    (2.0, None, None, None)
    """
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known and math.isfinite(value) else None


def mapping(value: Any) -> Mapping[Any, Any]:
    """A mapping, or an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def words(value: Any) -> str:
    """Text, or nothing for anything else."""
    return value if isinstance(value, str) else ""
