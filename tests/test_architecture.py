"""What holds for the source as a whole: which way imports point, and what importing costs."""

import ast
import graphlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import halve

SOURCE = Path(halve.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"
FILES = sorted(SOURCE.rglob("*.py"))

# Each room may import itself and what stands in an earlier line; CONTRIBUTING.md shows the same list.
ORDER = [
    {"locks", "progress", "text", "version"},
    {"errors", "markup"},
    {"binomial", "modules"},
    {"masks"},
    {"agreement", "batches", "cuda_graphs", "graph", "machine", "outputs", "process_state"},
    {"select"},
    {"detectors"},
    {"permute"},
    {"prune"},
    {"learn"},
    {"check", "certify", "engine", "export"},
    {"bench"},
    {"report"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
BESIDE = {"sources": {"errors", "text", "progress", "version", "modules", "masks", "batches"}}
TOP = {"__init__", "public", "__main__"}  # the public names, and the door to the command line
METHODS = [("halve.masks.mask", "halve.masks.file")]  # MaskSet.save, the counterpart of load: the only way back
HEAVY = ("typer", "rich", "torchvision", "timm", "accelerate", "PIL", "sklearn", "onnx", "onnxscript", "onnxruntime")


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_names(path):
    """Dotted names in halve that a file imports anywhere in it, also inside of functions, with the line."""
    package = ("halve", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join((*package[: len(package) - node.level + 1], node.module or "")) if node.level else None
            module = (start or node.module or "").rstrip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "halve")


def imported_rooms(path):
    """Rooms of halve that a file imports, with the line; '' is the package itself."""
    for name, line in imported_names(path):
        yield [*name.split("."), ""][1], line


def module_of(path):
    return ".".join(("halve", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def import_graph(files):
    """For each module the modules that it imports; a name inside of a module counts as the module."""
    known = {module_of(path) for path in files}
    graph = {module_of(path): set() for path in files}
    for path in files:
        for name, _ in imported_names(path):
            while name not in known:
                name = name.rpartition(".")[0]
            graph[module_of(path)].add(name)
        graph[module_of(path)].discard(module_of(path))
    return graph


def may_import(room, other):
    if room == other:
        return True
    if other == "sources":
        return room == "cli"
    if room in BESIDE:
        return other in BESIDE[room]
    if room == "public":
        return other in LEVEL and other != "cli"
    if room == "__init__":
        return other == "public"
    if room in ("cli", "__main__") and other == "":
        return True
    return other in LEVEL and LEVEL[other] < LEVEL.get(room, len(ORDER))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = room_of(path)
    assert room in LEVEL or room in BESIDE or room in TOP, f"{room} has no place in the order of rooms"
    wrong = [f"line {line}: halve.{other}" for other, line in imported_rooms(path) if not may_import(room, other)]
    assert not wrong, f"{room} must not import {wrong}"


def test_no_module_imports_itself_by_way_of_others():
    graph = import_graph(FILES)
    for module, other in METHODS:
        graph[module].remove(other)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_search_for_cycles_finds_imports_inside_of_functions(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    sources = {
        "__init__": "from halve.one import f",
        "one": "from halve import two\ndef f(): ...",
        "two": "def g():\n    from .one import f",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    graph = import_graph(sorted(tmp_path.glob("*.py")))
    assert graph == {"halve": {"halve.one"}, "halve.one": {"halve.two"}, "halve.two": {"halve.one"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


def rooms():
    """The folders and modules of the package, as CONTRIBUTING.md spells them."""
    found = [
        path for path in SOURCE.iterdir() if (path.is_dir() and path.name != "__pycache__") or path.suffix == ".py"
    ]
    return {path.name if path.is_file() else f"{path.name}/" for path in found}


def test_contributing_shows_the_rooms_in_the_order_of_imports():
    text = CONTRIBUTING.read_text()
    [shown] = re.findall(r"^    (locks\b.*(?:\n    .+)*)", text, re.M)
    levels = [set(re.findall(r"\w+", level)) for level in shown.split("->")]
    assert levels == ORDER
    table = text.partition("| room |")[2].partition("\n\n")[0]
    listed = [name for cell in re.findall(r"^\| (`[^|]+`) \|", table, re.M) for name in re.findall(r"`([^`]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert set(listed) == rooms()
    names = [re.sub(r"\.py$|/$", "", name) for name in listed]
    ranks = [LEVEL[name] for name in names if name in LEVEL]
    assert ranks == sorted(ranks)


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
    assert not may_import("public", "sources")
    assert not may_import("__init__", "check")
    assert not may_import("sources", "check")
    assert not may_import("check", "engine")


def test_importing_loads_nothing_that_only_some_commands_need():
    code = f"""if True:
        import sys, halve
        halve.learn
        print(*[name for name in {HEAVY!r} if name in sys.modules])
        import halve.cli.app
        print(*[name for name in {HEAVY!r} if name in sys.modules])"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    library, command_line = map(str.split, result.stdout.splitlines())
    assert library == []
    assert set(command_line) <= {"typer", "rich", "PIL"}


def test_the_public_names_load_on_first_use_and_no_package_hides_them():
    code = """if True:
        import sys, halve
        print(*[name for name in ("torch", "numpy", "safetensors") if name in sys.modules])
        from halve.learn.settings import Settings
        import halve.prune.prune
        print(*[name for name in halve.__all__ if name not in ("__version__", "Pattern") and
                not callable(getattr(halve, name))], halve.__version__)
        import halve.select.head, halve.bench.rounds
        from halve import *
        print(learn is halve.learn, select is halve.select, "compile" in dir(halve), hasattr(halve, "nothing"))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["", halve.__version__, "True True True False"]


def test_importing_halve_prints_and_warns_nothing():
    result = subprocess.run([sys.executable, "-W", "error", "-c", "import halve"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("name", [name for name in halve.__all__ if callable(getattr(halve, name))])
def test_every_public_name_has_an_example(name):
    assert ">>>" in (inspect.getdoc(getattr(halve, name)) or "")


def test_the_public_names_are_sorted_and_there():
    assert halve.__all__ == sorted(halve.__all__)
    assert all(hasattr(halve, name) for name in halve.__all__)
