"""Markdown, as the generated parts of pages need it."""

import textwrap


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in [heads, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def prose(text: str) -> str:
    """A paragraph or list item in lines of readable length."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 130, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
