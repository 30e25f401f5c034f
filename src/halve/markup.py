"""Text and tables as HTML, for notebooks and reports. Names may come from a stranger's file: they stay text."""

import html
from collections.abc import Iterable, Sequence

from halve.text import printable

_MOST_ROWS = 200  # of a table in a notebook


def text(value: object) -> str:
    """Return text that is shown as it is, inside of an element or of a quoted attribute.

    >>> text('<script>"1"')
    '&lt;script&gt;&quot;1&quot;'
    """
    return html.escape(printable(str(value)), quote=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a notebook; columns whose name starts with '>' are right-aligned.

    >>> table("2 layers", ("layer", ">weights"), [("conv", "64")])
    '<table><caption>2 layers</caption><thead><tr><th style="text-align:left">layer</th>\
<th style="text-align:right">weights</th></tr></thead><tbody><tr><td style="text-align:left">conv</td>\
<td style="text-align:right">64</td></tr></tbody></table>'
    """
    sides = ["right" if column.startswith(">") else "left" for column in columns]

    def row(tag: str, cells: Iterable[str]) -> str:
        inner = "".join(
            f'<{tag} style="text-align:{side}">{text(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{inner}</tr>"

    shown = list(rows)
    body = "".join(row("td", cells) for cells in shown[:_MOST_ROWS])
    if len(shown) > _MOST_ROWS:
        body += f'<tr><td colspan="{len(columns)}">and {len(shown) - _MOST_ROWS} more</td></tr>'
    head = row("th", (column.removeprefix(">") for column in columns))
    return f"<table><caption>{text(title)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
