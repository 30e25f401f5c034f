"""Tables that can be sorted: a cell is a text, with the value that it is sorted by and the length of its bar."""

from collections.abc import Sequence
from dataclasses import dataclass

from halve.markup import text


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        shown: Its text.
        value: What it is sorted by: a number, or its text. None if it is unknown, which comes last.
        bar: The length of its bar, from 0 to 1; None if it has none.
        kind: A class of the style sheet.
        note: A second, smaller line.
    """

    shown: str
    value: float | str | None = None
    bar: float | None = None
    kind: str = ""
    note: str = ""


def label(shown: str, kind: str = "", note: str = "") -> Cell:
    """A cell that is sorted by its text."""
    return Cell(shown, shown, kind=kind, note=note)


def amount(shown: str, value: float | None, largest: float | None = None, kind: str = "") -> Cell:
    """A cell with a number, and a bar relative to the largest one of its column."""
    bar = None if value is None or not largest else min(1.0, max(0.0, value / largest))
    return Cell(shown, value, bar, f"number {kind}".rstrip())


def table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]], *, sortable: bool = True
) -> str:
    """Return a table; the first cell of a row is its heading.

    Args:
        title: What is shown, for screen readers.
        columns: The names of the columns; those of numbers start with '>'.
        rows: The id of each row, or "", and its cells.
        sortable: Whether a click on the name of a column sorts the rows. Default: True.
    """
    head = "".join(_head(column, sortable and len(rows) > 1) for column in columns)
    body = "".join(_row(name, cells) for name, cells in rows)
    kind = ' class="sortable"' if sortable and len(rows) > 1 else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(title)}"><table{kind}>'
        f"<caption>{text(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def folded(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table that is hidden until it is opened: the values of a chart."""
    inner = table(title, columns, [("", row) for row in rows], sortable=False)
    return f"<details><summary>{text(title)}</summary>{inner}</details>"


def _head(column: str, sortable: bool) -> str:
    name, kind = text(column.removeprefix(">")), ' class="number"' if column.startswith(">") else ""
    if not sortable:
        return f'<th scope="col"{kind}>{name}</th>'
    return f'<th scope="col" aria-sort="none"{kind}><button type="button">{name}</button></th>'


def _row(name: str, cells: Sequence[Cell]) -> str:
    start = f'<tr id="{text(name)}">' if name else "<tr>"
    return f"{start}{''.join(_cell(cell, first=i == 0) for i, cell in enumerate(cells))}</tr>"


def _cell(cell: Cell, first: bool) -> str:
    tag = 'th scope="row"' if first else "td"
    kind = f' class="{text(cell.kind)}"' if cell.kind else ""
    value = "" if cell.value is None else f' data-value="{text(cell.value)}"'
    bar = "" if cell.bar is None else f'<i class="bar" style="width:{100 * cell.bar:.1f}%"></i>'
    note = f"<small>{text(cell.note)}</small>" if cell.note else ""
    return f"<{tag}{kind}{value}>{text(cell.shown)}{note}{bar}</{tag.partition(' ')[0]}>"
