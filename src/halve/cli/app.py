"""The commands of the command line. A new one is a function in a file of this folder, and a line in `COMMANDS`.

A command is imported when it is used, and listed by its docstring without importing it: importing PyTorch takes
seconds.
"""

import ast
import functools
import importlib
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from halve.version import VERSION

COMMANDS = {  # and the files that they are in
    "demo": "demo",
    "select": "select",
    "measure": "measure",
    "prune": "prune",
    "learn": "learn",
    "frontier": "frontier",
    "recalibrate": "recalibrate",
    "apply": "masks",
    "verify": "verify",
    "evaluate": "evaluate",
    "certify": "certify",
    "compile": "compile",
    "bench": "bench",
    "export": "export",
    "check-onnx": "export",
    "report": "report",
    "inspect": "masks",
    "pack": "masks",
    "unpack": "masks",
}


running: ContextVar[str | None] = ContextVar("running", default=None)  # the command that runs


class _Commands(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found = super().resolve_command(ctx, args)
        running.set(found[0])
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):  # not cut off, unlike click's
            formatter.write_dl([(name, _summary(name)) for name in COMMANDS])


@functools.cache
def command(name: str) -> Any:
    """Import a command."""
    function = getattr(importlib.import_module(f"halve.cli.{COMMANDS[name]}"), _function(name))
    single = typer.Typer(rich_markup_mode=None)
    single.command(name)(function)
    return typer.main.get_group(single).commands[name]


def _summary(name: str) -> str:
    """The first line of a command's docstring."""
    source = Path(__file__).with_name(f"{COMMANDS[name]}.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    found = [node for node in functions if node.name == _function(name)]
    return (ast.get_docstring(found[0]) or "").partition("\n")[0]


def _function(name: str) -> str:
    """The name of a command's function."""
    return name.replace("-", "_")


app = typer.Typer(
    name="halve",
    cls=_Commands,
    help="2:4 sparsity for trained convolutional networks: choose which half of the weights to keep, stored as masks "
    "beside the unchanged checkpoint. Start with 'halve demo'.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 success, 1 a check failed, 2 bad input, 130 interrupted; verify: 3 not applied, 4 unknown; "
    "check-onnx: 3 no layer eligible; learn: 5 below --min-agreement.",
)

for name in COMMANDS:
    app.command(name)(lambda: None)  # a name to suggest for a misspelt one; `get_command` returns the command


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halve {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
