"""The page around the parts: one HTML file that needs nothing else, and that nothing in it can make load anything."""

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from halve.errors import FileError
from halve.markup import text
from halve.masks.storage import write_atomically
from halve.version import VERSION

MADE_BY = "made by 'halve report'"  # in the first line
SUFFIX = ".report.html"


@dataclass(frozen=True)
class Part:
    """A part of the page: its id, its title and its HTML."""

    name: str
    title: str
    html: str
    kind: str = ""


@dataclass(frozen=True)
class Page:
    """The page that `halve.report` makes. `save` writes it; `print` shows its verdict, and a notebook the page.

    Args:
        verdict: The verdict in one line.
        html: The HTML of the page.
        facts: The numbers of the verdict, as JSON values.
    """

    verdict: str
    html: str = field(repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the page to an HTML file, customarily `NAME.report.html`, atomically.

        Args:
            path: File to write. An older report is replaced; anything else is not.
            force: Replace an existing file, whatever it is. Default: False.
        """
        path = Path(path)
        if not force and path.is_file() and path.stat().st_size and not is_report(path):
            raise FileError(
                f"cannot write {path}: the file exists and is not a report; choose another path, or replace it with "
                f"force=True"
            )
        return write_atomically(path, self.html.encode())

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        """The page in a frame, so that neither it nor the notebook styles the other."""
        return (
            f'<iframe srcdoc="{html.escape(self.html, quote=True)}" title="{text(self.verdict)}" '
            f'sandbox="allow-scripts" style="width:100%;height:720px;border:0"></iframe>'
        )


def is_report(path: Path) -> bool:
    """Whether a file says that it is a report."""
    try:
        with path.open("rb") as file:
            return MADE_BY.encode() in file.readline(1 << 10)
    except OSError:
        return False


def page(title: str, top: str, parts: Sequence[Part], *, foot: str = "", refresh: int | None = None) -> str:
    """Return the HTML of a page.

    Args:
        title: The heading.
        top: The HTML below it.
        parts: The parts, in order.
        foot: What stands at the end, as text.
        refresh: Seconds after which the page loads itself again. Default: never.
    """
    style, script = _file("page.css"), _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
    links = "".join(f'<a href="#{part.name}">{text(part.title)}</a>' for part in parts)
    nav = f'<nav aria-label="Parts of this page">{links}</nav>' if len(parts) > 1 else ""
    sections = "".join(
        f'<section id="{part.name}" class="{part.kind}" aria-labelledby="{part.name}-title">'
        f'<h2 id="{part.name}-title">{text(part.title)}</h2>{part.html}</section>'
        for part in parts
    )
    return (
        f'<!doctype html><!-- {MADE_BY} -->\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{again}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="generator" '
        f'content="halve {VERSION}"><link rel="icon" href="data:,"><title>{text(title)} - halve</title>'
        f"<style>{style}</style></head>\n<body><header><h1>{text(title)}</h1>{top}{nav}</header>\n"
        f"<main>{sections}</main>\n<footer><p>{text(foot)}</p></footer><script>{script}</script></body></html>\n"
    )


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
