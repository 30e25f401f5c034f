"""JSON to values and back, for what files with compiled networks hold: dtypes, sizes, texts and dataclasses."""

import dataclasses
import functools
import typing
from typing import Any, TypeVar

import torch

from halve.errors import first_line

T = TypeVar("T")
_MOST = 1 << 31
_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex32", "complex64", "complex128"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}


def reason(error: Exception) -> str:
    """What an error says, with its type if it is not one of ours."""
    return first_line(error).removeprefix("ValueError: ")


def dtype_named(name: Any, floating: bool = False) -> torch.dtype:
    """A dtype by its name; with `floating`, one to compute in."""
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or (floating and not dtype.is_floating_point):
        raise ValueError(f"unknown {'floating-point ' if floating else ''}dtype {str(name)[:20]!r}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def positive(text: str) -> int:
    """A positive integer from the key of a JSON object."""
    if not text.isascii() or not text.isdigit() or text.startswith("0") or len(text) > 18:
        raise ValueError(f"a size must be a positive integer, got {text[:20]!r}")
    return int(text)


def printable(text: str) -> str:
    r"""Text as files hold it, with escapes for characters that could control a terminal.

    >>> printable("conv\x1b[2J")
    'conv\\x1b[2J'
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def check_text(text: Any) -> str:
    """A text from a file."""
    if not isinstance(text, str) or not text.isprintable():
        raise ValueError(f"a text must be printable, got {str(text)[:40]!r}")
    return text


def build(kind: type[T], plain: Any) -> T:
    """A dataclass with the fields of a JSON object. Raises `ValueError` if one is missing, unknown or invalid.

    Fields may be texts, booleans, integers from 0 to 2^31 - 1, pairs of these, and numbers or None.

    >>> from halve.engine.operations import Linear
    >>> build(Linear, {"rows": 8, "channels": 4, "activation": "relu", "scaled": False})
    Linear(rows=8, channels=4, activation='relu', scaled=False)
    >>> build(Linear, {"rows": "8", "channels": 4, "activation": "relu", "scaled": False})
    Traceback (most recent call last):
    ValueError: rows of a Linear: '8' is not valid
    """
    hints = _hints(kind)  # type: ignore[arg-type]  # classes are hashable
    if not isinstance(plain, dict) or plain.keys() != hints.keys():
        raise ValueError(f"a {kind.__name__} must have the fields {', '.join(hints)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} of a {kind.__name__}: {str(value)[:40]!r} is not valid")
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    if hint is int:
        return type(value) is int and 0 <= value < _MOST
    if hint is str:
        return isinstance(value, str) and value.isprintable()
    if hint is bool:
        return isinstance(value, bool)
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return type(value) is tuple and len(value) == len(inner) and all(map(_fits, value, inner))
    if set(inner) == {float, type(None)}:
        return value is None or type(value) in (int, float)
    raise TypeError(f"a {hint} cannot be read from files")
