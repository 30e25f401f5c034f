import os
import subprocess
import sys
import time

import pytest

from halve.locks import locked

fcntl = pytest.importorskip("fcntl")
HOLD = """
import sys
from pathlib import Path
from halve.locks import locked

with locked(Path(sys.argv[1]), 10):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the lock until its standard input is closed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_process_waits_for_its_turn(tmp_path, holder):
    started = time.monotonic()
    with locked(tmp_path / "lock", 0.3):
        assert time.monotonic() - started >= 0.3  # gave up waiting
    holder.stdin.close()
    with locked(tmp_path / "lock", 60):
        lock = os.open(tmp_path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)


def test_a_killed_process_does_not_keep_its_turn(tmp_path, holder):
    holder.kill()
    holder.wait(20)
    started = time.monotonic()
    with locked(tmp_path / "lock", 20):
        assert time.monotonic() - started < 5


def test_a_process_that_inherited_the_file_does_not_keep_the_lock(tmp_path, monkeypatch):
    inherited, close = [], os.close
    monkeypatch.setattr(os, "close", lambda file: (inherited.append(os.dup(file)), close(file)))
    with locked(tmp_path / "lock", 1):
        pass
    monkeypatch.undo()
    [file] = inherited  # as a forked process has it: the same open file
    started = time.monotonic()
    with locked(tmp_path / "lock", 20):
        assert time.monotonic() - started < 5
    os.close(file)


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    with locked(tmp_path / "file" / "lock", 1):
        pass
