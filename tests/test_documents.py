"""What README and docs show is true: their examples run, their tables are the recorded results."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md", "docs/engine.md"]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore::halve.errors.ChangedWeightsWarning", "ignore::halve.errors.EngineWarning")
def test_the_python_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, "docs/method.md", "docs/file-format.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_tables_are_the_recorded_results():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "experiments" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for name in tables.TABLES:
        path, now, wanted = tables.written(name)
        assert now == wanted, f"run {sys.executable} experiments/tables.py: {path.name} differs"


def test_every_command_that_a_page_shows_exists():
    from halve.cli.app import app

    commands = {command.callback.__name__ for command in app.registered_commands}
    for page in PAGES:
        shown = set(re.findall(r"^\s*halve (\w+)\s", (ROOT / page).read_text(), re.M))
        assert shown <= commands
