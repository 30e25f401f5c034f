"""Tests of one group share a process: on a GPU, those of one network would otherwise each plan it again."""

import os
import subprocess
import sys
from pathlib import Path

GROUPED = """
import os
from pathlib import Path
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_grouped(number):
    Path(__file__).with_name(f"{number}.pid").write_text(str(os.getpid()))
"""


def test_one_group_runs_in_one_process(tmp_path: Path):
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    options = "-p xdist -p no:cacheprovider -n 2 --dist loadgroup"
    command = [sys.executable, "-m", "pytest", *options.split()]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = [path.read_text() for path in tmp_path.glob("*.pid")]
    assert len(found) == 8
    assert len(set(found)) == 1
