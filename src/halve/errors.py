"""Exceptions and warnings. A message says what, where, what was found, what is allowed and what to do next."""

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from halve.text import printable

_PACKAGE = str(Path(__file__).parent)
_DECORATORS = "contextlib.py"  # of Python and of PyTorch


class HalveError(Exception):
    """Base class of all errors that halve raises on purpose.

    >>> import halve
    >>> try:
    ...     halve.Pattern("5:4")
    ... except halve.HalveError as error:
    ...     print(error)
    pattern '5:4' keeps 5 of every 4 weights: N must be between 1 and M, and M at most 256
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class PatternError(HalveError, ValueError):
    """An invalid N:M pattern, or codes that do not match the pattern."""


class ModelError(HalveError, ValueError):
    """A model, or one of its layers, does not support what was asked for."""


class OptionError(HalveError, ValueError):
    """An invalid option value, or options that exclude each other."""


class MaskError(HalveError, ValueError):
    """Masks that do not fit the model, its weights or each other."""


class FileError(HalveError, OSError):
    """A file that cannot be read, trusted or written."""


class DataError(HalveError, ValueError):
    """Images, labels or batches that cannot be used."""


class SourceError(HalveError, ValueError):
    """A model or dataset that cannot be found or built by its name."""


class CertificateError(HalveError, ValueError):
    """A certificate that does not hold, or was made for other weights, masks or images."""


class EngineError(HalveError, RuntimeError):
    """A kernel that cannot be compiled or run."""


class EngineWarning(UserWarning):
    """A network that could run sparse falls back to dense."""


class LearningError(HalveError, RuntimeError):
    """Learning stopped early. `masks` holds what was learned so far, or None."""

    def __init__(self, message: str, masks: object = None) -> None:
        super().__init__(message)
        self.masks = masks


class SpeedWarning(UserWarning):
    """Masks would cost accuracy and not make the network faster."""


class LearningWarning(UserWarning):
    """Learning ended early, found masks that are poor or could not be validated, or is not reproducible bit for bit."""


class ChannelOrderWarning(UserWarning):
    """Masks were applied in a channel order in which hardware cannot use them."""


class DtypeWarning(UserWarning):
    """Tensors keep their dtype, since the requested one cannot hold their values."""


class ChangedWeightsWarning(UserWarning):
    """Masks are applied to weights other than those they were made for."""


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning at the line of the user's code that called halve.

    Public functions call each other and have decorators, so a fixed `stacklevel` would point into either.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), category, stacklevel=level)


def _is_inside(file: str) -> bool:
    return file.startswith(_PACKAGE) or file.endswith(_DECORATORS)


def listed(names: Iterable[object], most: int = 8) -> str:
    """Join names for a message; beyond `most`, only count them.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    items = [str(name) for name in names]
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException, most: int = 160) -> str:
    """The first line of an error message, preceded by the error's type unless it is one of halve's.

    >>> first_line(ValueError("no such layer\\n  at line 3"))
    'ValueError: no such layer'
    """
    text = (str(error).strip().splitlines() or [""])[0][:most]
    return text if isinstance(error, HalveError) else f"{type(error).__name__}: {text}".removesuffix(": ")
