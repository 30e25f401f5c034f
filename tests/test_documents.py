"""What README and docs show is true: their examples run, their tables and figures are the recorded results."""

import contextlib
import importlib
import inspect
import io
import re
import sys
import tomllib
import xml.dom.minidom
from pathlib import Path

import pytest

from halve import errors
from halve.cli.app import COMMANDS, app, command
from halve.engine.saved import file as compiled
from halve.learn import run_state
from halve.masks import file, packed
from halve.version import VERSION

ROOT = Path(__file__).parent.parent
PAGES = [path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if "_build" not in path.parts]
NAMES = {str(path.relative_to(ROOT)): path for path in sorted(PAGES)}
WITH_EXAMPLES = [name for name, path in NAMES.items() if "```python\n" in path.read_text()]


@pytest.mark.parametrize("page", WITH_EXAMPLES)
@pytest.mark.filterwarnings("ignore::halve.errors.ChangedWeightsWarning", "ignore::halve.errors.EngineWarning")
@pytest.mark.filterwarnings("ignore:the learned masks are worse")  # after so few steps
def test_the_python_examples_of_a_page_run_in_order_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", NAMES[page].read_text(), re.S)
    names = {}
    for block, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, page, "exec"), names)
        assert not shown or printed.getvalue() == shown


def anchors(path):
    """What links can refer to: headings, as GitHub spells them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page):
    path = NAMES[page]
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_tables_are_the_recorded_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    tables = importlib.import_module("tables")
    for name in tables.TABLES:
        path, now, wanted = tables.written(name)
        assert now == wanted, f"run {sys.executable} experiments/tables.py: {path.name} differs"


def test_the_versions_of_file_formats_are_the_current_ones():
    text = NAMES["docs/reference/file-formats.md"].read_text()
    table = re.findall(r"^\| `NAME([\w.]+)` \| `([\w.]+)` \| (\d+) \|", text, re.M)
    formats = [(kind.SUFFIX, kind.FORMAT) for kind in (file, packed, run_state, compiled)]
    assert table == [(suffix, format_.name, str(format_.version)) for suffix, format_ in formats]


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/figures/*.svg")), ids=lambda path: path.name)
def test_the_pictures_are_well_formed(path):
    drawing = xml.dom.minidom.parse(str(path)).documentElement
    assert drawing.tagName == "svg"
    assert drawing.getAttribute("aria-label")


def shown_commands(text):
    """The command lines on a page: name of the command, and all of its options."""
    lines = re.sub(r"\\\n\s*", "", text)  # continued lines
    found = re.findall(r"^(?: {4}|\S.*`)halve ([a-z][a-z-]*)((?: .*)?)$", lines, re.M)
    return [
        (name, re.findall(r"--[a-z][a-z0-9-]*", rest.partition("  # ")[0].partition("`")[0])) for name, rest in found
    ]


@pytest.mark.parametrize("page", NAMES)
def test_every_command_and_option_that_a_page_shows_exists(page):
    for name, options in shown_commands(NAMES[page].read_text()):
        assert name in COMMANDS
        known = {flag for parameter in command(name).params for flag in (*parameter.opts, *parameter.secondary_opts)}
        assert set(options) <= known | {"--help"}, name


def test_every_error_warning_and_exit_code_has_a_remedy():
    text = NAMES["docs/troubleshooting.md"].read_text()
    kinds = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == "halve.errors"
    ]
    assert len(kinds) > 10
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.M)
    assert {name for name, _ in rows} == set(kinds) - {"HalveError"}
    assert "`halve.HalveError`" in text
    assert all(cell.strip() for _, cells in rows for cell in cells.split("|"))
    codes = re.findall(r"\b(\d+) ", app.info.epilog)  # every exit code that `halve --help` names
    assert len(codes) >= 7
    assert {code for code, _ in re.findall(r"^\| (\d+) \|(.*)\|$", text, re.M)} == set(codes)


def test_the_version_is_written_in_one_place():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "halve.version.VERSION"}
    assert f"## {VERSION}" in NAMES["CHANGELOG.md"].read_text()
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text(), re.M)
