"""The commands of the command line. A new one is a function in a file of this folder, and a line in `COMMANDS`."""

from typing import Annotated

import typer

from halve.cli import bench, compile, demo, evaluate, learn, masks, prune, select, show, verify
from halve.version import VERSION

COMMANDS = (
    demo.demo,
    select.select,
    prune.prune,
    learn.learn,
    masks.apply,
    verify.verify,
    evaluate.evaluate,
    compile.compile,
    bench.bench,
    masks.inspect,
    masks.pack,
    masks.unpack,
)

app = typer.Typer(
    name="halve",
    help="2:4 sparsity for trained convolutional networks: choose which half of the weights to keep, stored as masks "
    "beside the unchanged checkpoint. Start with 'halve demo'.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 success, 1 a check failed, 2 bad input, 130 interrupted; learn: 5 below --min-agreement.",
)

for command in COMMANDS:
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


show.know_options(
    flag
    for command in typer.main.get_group(app).commands.values()
    for option in command.params
    for flag in (*option.opts, *option.secondary_opts)
)
