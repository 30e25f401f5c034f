"""What halve raises. Every message says what, where, what was found, what is allowed and what to do next."""

from collections.abc import Iterable


class HalveError(Exception):
    """Base of everything that halve raises on purpose; catching it catches all of them.

    >>> import halve
    >>> try:
    ...     halve.Pattern("5:4")
    ... except halve.HalveError as error:
    ...     print(error)
    pattern '5:4' keeps 5 of every 4: N must be from 1 to M, M at most 256
    """


class PatternError(HalveError, ValueError):
    """An N:M rule that cannot be used, or codes that break theirs."""


class ModelError(HalveError, ValueError):
    """A model or one of its layers cannot do what was asked."""


class OptionError(HalveError, ValueError):
    """An option with a value that is not allowed, or options that exclude each other."""


class MaskError(HalveError, ValueError):
    """Masks that do not fit the model, its weights or each other."""


class FileError(HalveError, OSError):
    """A file that cannot be read, trusted or written."""


class DataError(HalveError, ValueError):
    """Images, labels or batches that cannot be used."""


class SourceError(HalveError, ValueError):
    """A model or data set that was named and cannot be found or built."""


class EngineError(HalveError, RuntimeError):
    """A kernel that cannot be compiled or run."""


class EngineWarning(UserWarning):
    """A network runs dense that could be sparse."""


class LearningError(HalveError, RuntimeError):
    """Learning could not go on; `masks` is what was learned until then (None if nothing)."""

    def __init__(self, message: str, masks: object = None) -> None:
        super().__init__(message)
        self.masks = masks


class LearningWarning(UserWarning):
    """Learning ended early, or cannot be repeated to the bit."""


class ChangedWeightsWarning(UserWarning):
    """Masks were put on weights that are not those they were made for."""


def listed(names: Iterable[object], most: int = 8) -> str:
    """Names for a message, the long tail counted.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    items = [str(name) for name in names]
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException, most: int = 160) -> str:
    """An error in one line, for reports: halve's own message, or the type and first line of any other error.

    >>> first_line(ValueError("no such layer\\n  at line 3"))
    'ValueError: no such layer'
    """
    text = (str(error).strip().splitlines() or [""])[0][:most]
    return text if isinstance(error, HalveError) else f"{type(error).__name__}: {text}".removesuffix(": ")
