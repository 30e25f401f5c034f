"""The table of commands."""

from typing import Annotated

import typer

from halve.cli import bench, check, compile, demo, find, learn, masks
from halve.version import VERSION

app = typer.Typer(
    name="halve",
    help="2:4 sparsity for trained convolutional networks: which half of the weights can go, stored beside the "
    "untouched checkpoint. Start with 'halve demo'.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted.",
)

for command in (
    demo.demo,
    find.select,
    find.prune,
    learn.learn,
    masks.apply,
    check.verify,
    check.evaluate,
    compile.compile,
    bench.bench,
    masks.inspect,
    masks.pack,
    masks.unpack,
):
    app.command()(command)


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
