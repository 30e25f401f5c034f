"""Text to show: safe, though it may come from someone else's file, and in columns."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

# Control characters (escape sequences), formatting ones (bidirectional overrides), surrogates, other line breaks.
_CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    r"""Return text with escapes in place of characters that could control a terminal or reorder what is shown.

    Names, recipes and errors may come from a file that someone else wrote. Line breaks stay.

    >>> printable("layer\x1b[2J\u202e\n2")
    'layer\\x1b[2J\\u202e\n2'
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character == "\n" or unicodedata.category(character) not in _CONTROLS:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def aligned(rows: Iterable[Sequence[str]], separator: str = " | ", *, right: bool = False) -> list[str]:
    """Return rows of cells as lines with aligned columns.

    >>> aligned([("layer", "ms"), ("a", "0.5")])
    ['layer | ms', 'a     | 0.5']
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    align = str.rjust if right else str.ljust
    return [separator.join(map(align, row, widths)).rstrip() for row in table]


def formatted_bytes(count: int) -> str:
    """Format a number of bytes.

    >>> formatted_bytes(2_345_678)
    '2.35 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def interval(ends: Any) -> str:
    """Format a confidence interval of a share, or a dash if there is none.

    >>> interval((0.9, 0.975)), interval(None)
    ('90.0-97.5 %', '-')
    """
    known = isinstance(ends, tuple | list) and len(ends) == 2 and all(isinstance(end, int | float) for end in ends)
    return f"{100 * ends[0]:.1f}-{100 * ends[1]:.1f} %" if known else "-"
