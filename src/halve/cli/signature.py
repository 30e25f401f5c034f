"""Derive the options of a command from a function of the library: names and types from its signature, help from the
`Args:` list of its docstring.

An option that is not given on the command line is not passed on, so that the library's defaults and presets apply.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_ENTRY = re.compile(r" {4}(?P<names>\w+(?:, \w+)*): (?P<text>.*)")


def documented(function: Callable[..., Any]) -> dict[str, str]:
    """Return the entries of the `Args:` list in a docstring, by argument name.

    >>> def double(x: int, times: int = 1) -> int:
    ...     '''Double a number.
    ...
    ...     Args:
    ...         x: The number.
    ...         times: How often
    ...             to do so. Default: 1.
    ...     '''
    >>> documented(double)
    {'x': 'The number.', 'times': 'How often to do so. Default: 1.'}
    """
    entries: dict[str, str] = {}
    names: list[str] = []
    lines = iter((inspect.getdoc(function) or "").splitlines())
    for line in lines:
        if line == "Args:":
            break
    for line in lines:
        if not line.startswith("    "):
            break
        if entry := _ENTRY.fullmatch(line):
            names = entry["names"].split(", ")
            entries |= dict.fromkeys(names, entry["text"])
        else:
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def derived(
    function: Callable[..., Any],
    hints: Mapping[str, Any],
    leave_out: Collection[str] = (),
    notes: Mapping[str, str] | None = None,
) -> list[inspect.Parameter]:
    """Return one option for each documented argument, in the order of the docstring.

    Args:
        function: A function of the library.
        hints: Types of its arguments, including those that it takes as keywords.
        leave_out: Arguments that become no option.
        notes: What the help of an option says in addition.
    """
    helps = {name: text for name, text in documented(function).items() if name not in leave_out}
    arguments = inspect.signature(function).parameters
    result = []
    for name, text in helps.items():
        words = " ".join(filter(None, (_in_words(text, helps), (notes or {}).get(name))))
        flag = name in arguments and arguments[name].default is False
        annotation = _flag(name, words) if flag else _annotation(hints[name], words)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        result.append(inspect.Parameter(name, kind, default=None, annotation=annotation))
    return result


def with_options(
    options: Sequence[inspect.Parameter], after: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace `**given` in the signature of a command by these options, listed after another one in the help."""

    def replace(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        at = 1 + next(index for index, p in enumerate(parameters) if p.name == after)
        parameters[at:at] = options
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return replace


def numbers(text: str) -> float | tuple[float, ...]:
    """Read a number, or several separated by commas.

    >>> numbers("0.5"), numbers("1,0")
    (0.5, (1.0, 0.0))
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number, nor numbers separated by commas") from None
    return found[0] if len(found) == 1 else found


def _flag(name: str, text: str) -> Any:
    return Annotated[
        bool | None, typer.Option(f"--{name.replace('_', '-')}", help=text.removesuffix(" Default: False."))
    ]


def _annotation(hint: Any, text: str) -> Any:
    """The type of an option that takes what can be written on a command line."""
    options = set(typing.get_args(hint)) if typing.get_origin(hint) in (types.UnionType, typing.Union) else {hint}
    origins = {typing.get_origin(option) or option for option in options}
    if tuple in origins:
        return Annotated[Any, typer.Option(parser=numbers, metavar="NUMBERS", help=text)]
    if Sequence in origins:
        return Annotated[list[str] | None, typer.Option(help=f"{text} Repeatable.")]
    for kind in (bool, int, float, Path):
        if kind in origins:
            return Annotated[kind | None, typer.Option(help=text)]
    assert origins & {str, Literal, Any}, f"no option can be made for {hint}"
    return Annotated[str | None, typer.Option(help=text)]


def _in_words(text: str, names: Collection[str]) -> str:
    """Help in the words of the command line: `steps` becomes --steps, (1.0, 0.0) becomes 1.0,0.0."""
    text = re.sub(r"; in Python also [^.]*(?:\.\w[^.]*)*(?=\.)", "", text)
    text = re.sub(r"`(\w+)`", lambda found: f"--{found[1].replace('_', '-')}" if found[1] in names else found[1], text)
    text = re.sub(r"\(([\d.]+), ([\d.]+)\)", r"\1,\2", text)
    text = re.sub(r"`halve\.(\w+)`", r"'halve \1 --help'", text)
    return text.replace('"', "")
