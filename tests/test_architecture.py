"""What holds for the source as a whole: which way imports point, and what importing costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import halve

SOURCE = Path(halve.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# Each room may import itself and what stands in an earlier line; CONTRIBUTING.md shows the same list.
ORDER = [
    {"errors", "version"},
    {"modules"},
    {"masks"},
    {"agreement", "batches", "cuda_graphs", "graph", "outputs"},
    {"select"},
    {"permute"},
    {"prune"},
    {"learn"},
    {"check", "certify", "engine", "export"},
    {"bench"},
    {"report"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
BESIDE = {"sources": {"errors", "version", "modules", "masks", "batches"}}
TOP = {"__init__", "__main__"}  # the public names, and the door to the command line
HEAVY = ("typer", "rich", "torchvision", "timm", "accelerate", "PIL", "sklearn")


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path):
    """Rooms of halve that a file imports anywhere in it, with the line; '' is the package itself."""
    package = ("halve", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join((*package[: len(package) - node.level + 1], node.module or "")) if node.level else None
            module = (start or node.module or "").rstrip(".")
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "halve" else [module]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "halve":
                yield [*name.split("."), ""][1], node.lineno


def may_import(room, other):
    if room == other:
        return True
    if other == "sources":
        return room == "cli"
    if room in BESIDE:
        return other in BESIDE[room]
    if room == "__init__":
        return other in LEVEL and other != "cli"
    if room in ("cli", "__main__") and other == "":
        return True
    return other in LEVEL and LEVEL[other] < LEVEL.get(room, len(ORDER))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = room_of(path)
    assert room in LEVEL or room in BESIDE or room in TOP, f"{room} has no place in the order of rooms"
    wrong = [f"line {line}: halve.{other}" for other, line in imported_rooms(path) if not may_import(room, other)]
    assert not wrong, f"{room} must not import {wrong}"


def test_the_check_of_imports_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "masks").mkdir()
    path = tmp_path / "masks" / "bad.py"
    lines = [
        "import halve",
        "import halve.prune.scores as s",
        "from halve import cli, masks",
        "from halve.check.verify import verify",
        "from ..select import head",
        "from . import mask",
        "def f(): from halve.engine import plan",
        "import torch",
    ]
    path.write_text("\n".join(lines))
    found = list(imported_rooms(path))
    rooms = [("", 1), ("prune", 2), ("cli", 3), ("masks", 3), ("check", 4), ("select", 5), ("masks", 6), ("engine", 7)]
    assert found == rooms
    wrong = [other for other, _ in found if not may_import("masks", other)]
    assert wrong == ["", "prune", "cli", "check", "select", "engine"]
    assert may_import("cli", "sources")
    assert may_import("cli", "")
    assert not may_import("report", "sources")
    assert not may_import("__init__", "sources")
    assert not may_import("sources", "check")
    assert not may_import("check", "engine")


def test_importing_loads_nothing_that_only_some_commands_need():
    code = f"""if True:
        import sys, halve
        print(*[name for name in {HEAVY!r} if name in sys.modules])
        import halve.cli.app
        print(*[name for name in {HEAVY!r} if name in sys.modules])"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    library, command_line = map(str.split, result.stdout.splitlines())
    assert library == []
    assert set(command_line) <= {"typer", "rich", "PIL"}


def test_importing_halve_prints_and_warns_nothing():
    result = subprocess.run([sys.executable, "-W", "error", "-c", "import halve"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("name", [name for name in halve.__all__ if callable(getattr(halve, name))])
def test_every_public_name_has_an_example(name):
    assert ">>>" in (inspect.getdoc(getattr(halve, name)) or "")


def test_the_public_names_are_sorted_and_there():
    assert halve.__all__ == sorted(halve.__all__)
    assert all(hasattr(halve, name) for name in halve.__all__)
