"""The directive `command-help`: every command with its help, as `halve COMMAND --help` prints it."""

from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from halve.cli.app import COMMANDS, app, command

WIDTH = 90  # columns


def help_of(name: str | None = None) -> str:
    """The help of a command, or of halve itself."""
    halve = click.Context(get_command(app), info_name="halve", max_content_width=WIDTH, terminal_width=WIDTH)
    if name is None:
        return halve.get_help()
    return click.Context(command(name), halve, name, max_content_width=WIDTH, terminal_width=WIDTH).get_help()


class CommandHelp(SphinxDirective):
    """A section for each command."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = [_literal(help_of())]
        for name in COMMANDS:
            section = nodes.section("", nodes.title(text=f"halve {name}"), _literal(help_of(name)), ids=[name])
            self.state.document.note_implicit_target(section)
            found.append(section)
        return found


def _literal(text: str) -> nodes.Node:
    return nodes.literal_block(text, text, language="text")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
