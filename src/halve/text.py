"""Text that may come from someone else's file, made safe to show."""

import unicodedata

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
