import multiprocessing
import os
import signal
import time

import pytest

from halve.locks import locked

fcntl = pytest.importorskip("fcntl")


def hold(path, ready, release):
    with locked(path, 10):
        ready.set()
        release.wait(20)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "lock", ready, release))
    process.start()
    assert ready.wait(60)
    yield process, release
    release.set()
    process.join(20)


def test_a_process_waits_for_its_turn(tmp_path, holder):
    _, release = holder
    started = time.monotonic()
    with locked(tmp_path / "lock", 0.3):
        assert time.monotonic() - started >= 0.3  # gave up waiting
    release.set()
    with locked(tmp_path / "lock", 60):
        lock = os.open(tmp_path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)


def test_a_killed_process_does_not_keep_its_turn(tmp_path, holder):
    process, _ = holder
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    started = time.monotonic()
    with locked(tmp_path / "lock", 20):
        assert time.monotonic() - started < 5


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    with locked(tmp_path / "file" / "lock", 1):
        pass
