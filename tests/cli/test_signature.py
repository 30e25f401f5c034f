import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from halve.cli.signature import derived, documented, numbers, with_options


def brew(
    cups: int,
    *,
    sugar: float | None = None,
    kind: Literal["tea", "coffee"] = "tea",
    milk: bool = True,
    loud: bool = False,
    pair: float | tuple[float, float] = (1.0, 0.5),
    names: Sequence[str] = (),
    out: str | Path | None = None,
    taste: Any = None,
) -> None:
    """Brew something.

    Args:
        cups: How many.
        sugar: Grams of sugar; see `kind`
            and `halve.select`.
        kind: "tea" or "coffee"; in Python also a function of `halve.Views`. Default: "tea".
        milk: With milk. Default: True.
        loud: With noise. Default: False.
        pair: Start and end. Default: (1.0, 0.5).
        names, taste: Not important.
        out: Where to put it.

    Returns:
        nothing: at all
    """


HINTS = inspect.get_annotations(brew)


def command_of(options):
    given = {}

    @with_options(options, after="size")
    def command(size: Annotated[int, typer.Option(help="Size.")] = 1, last: int = 2, **options: Any) -> None:
        given.update(options, size=size, last=last)

    application = typer.Typer()
    application.command()(command)
    return application, given


def test_entries_of_a_docstring_are_read_with_their_continuations():
    entries = documented(brew)
    assert list(entries) == ["cups", "sugar", "kind", "milk", "loud", "pair", "names", "taste", "out"]
    assert entries["sugar"] == "Grams of sugar; see `kind` and `halve.select`."
    assert entries["names"] == entries["taste"] == "Not important."
    assert documented(lambda: None) == {}


def test_options_come_in_the_order_of_the_docstring_where_they_are_wanted():
    application, _ = command_of(derived(brew, HINTS, leave_out=["cups"]))
    names = [option.name for option in typer.main.get_command(application).params]
    assert names[:4] == ["size", "sugar", "kind", "milk"]
    assert names[8:10] == ["out", "last"]


def test_options_that_are_not_given_are_none_and_the_rest_have_their_type():
    application, given = command_of(derived(brew, HINTS, leave_out=["cups"]))
    assert CliRunner().invoke(application, []).exit_code == 0
    assert {name: value for name, value in given.items() if value not in (None, [])} == {"size": 1, "last": 2}
    line = "--sugar 2 --kind coffee --no-milk --loud --pair 3,4 --names a --names b --out x --taste good --size 5"
    assert CliRunner().invoke(application, line.split()).exit_code == 0
    assert given == {
        "sugar": 2.0,
        "kind": "coffee",
        "milk": False,
        "loud": True,
        "pair": (3.0, 4.0),
        "names": ["a", "b"],
        "out": Path("x"),
        "taste": "good",
        "size": 5,
        "last": 2,
    }


def test_help_speaks_of_options_instead_of_arguments():
    application, _ = command_of(derived(brew, HINTS, leave_out=["cups"], notes={"out": "Beside --kind."}))
    helps = {option.name: option.help for option in typer.main.get_command(application).params}
    assert helps["sugar"] == "Grams of sugar; see --kind and 'halve select --help'."
    assert helps["kind"] == "tea or coffee. Default: tea."
    assert helps["loud"] == "With noise."
    assert helps["pair"] == "Start and end. Default: 1.0,0.5."
    assert helps["names"] == "Not important. Repeatable."
    assert helps["out"] == "Where to put it. Beside --kind."


def test_numbers_are_one_or_several():
    assert numbers("0.5") == 0.5
    assert numbers("1,2,3") == (1.0, 2.0, 3.0)
    with pytest.raises(typer.BadParameter, match="'1;2' is not a number"):
        numbers("1;2")
