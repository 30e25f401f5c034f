"""What README and docs show is true: their examples run, their tables are the recorded results."""

import contextlib
import importlib
import io
import re
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from halve.engine.saved import file as compiled
from halve.learn import run_state
from halve.masks import file, packed

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md", "docs/engine.md", "docs/export.md", "docs/certificates.md"]
WITHOUT_EXAMPLES = [
    "docs/accuracy.md",
    "docs/speed.md",
    "docs/method.md",
    "docs/file-format.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore::halve.errors.ChangedWeightsWarning", "ignore::halve.errors.EngineWarning")
@pytest.mark.filterwarnings("ignore:the learned masks are worse")  # after so few steps
def test_the_python_examples_of_a_page_run_in_order_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", (ROOT / page).read_text(), re.S)
    assert blocks
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


@pytest.mark.parametrize("page", [*PAGES, *WITHOUT_EXAMPLES])
def test_links_lead_somewhere(page):
    path = ROOT / page
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
    table = re.findall(
        r"^\| `NAME([\w.]+)` \| `([\w.]+)` \| (\d+) \|", (ROOT / "docs/file-format.md").read_text(), re.M
    )
    formats = [(kind.SUFFIX, kind.FORMAT) for kind in (file, packed, run_state, compiled)]
    assert table == [(suffix, format_.name, str(format_.version)) for suffix, format_ in formats]


@pytest.mark.parametrize("name", ["halve.svg", "certificates.svg"])
def test_the_pictures_are_well_formed(name):
    drawing = xml.dom.minidom.parse(str(ROOT / "docs" / name))
    assert drawing.documentElement.tagName == "svg"


def test_every_command_that_a_page_shows_exists():
    from halve.cli.app import COMMANDS

    for page in PAGES:
        shown = set(re.findall(r"^\s*halve (\w+)\s", (ROOT / page).read_text(), re.M))
        assert shown <= COMMANDS.keys()
