from types import SimpleNamespace

import pytest
import torch

from halve.engine.turns import turn

fcntl = pytest.importorskip("fcntl")
GPU = torch.device("cuda", 0)


def is_free(path):
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def lock(monkeypatch, tmp_path):
    """The file that processes lock before they time on a GPU."""
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-b"))
    return tmp_path / "timing-a-b.lock"


def test_a_turn_holds_the_lock_of_its_gpu_also_within_another(lock):
    with turn(GPU):
        assert not is_free(lock)
        with turn(GPU):
            assert not is_free(lock)
        assert not is_free(lock)
    assert is_free(lock)


def test_an_error_ends_the_turn(lock):
    with pytest.raises(RuntimeError, match="no kernel"), turn(GPU):
        raise RuntimeError("no kernel")
    assert is_free(lock)
    with turn(GPU):
        assert not is_free(lock)


def test_on_a_cpu_nobody_waits(lock):
    with turn(torch.device("cpu")):
        assert not lock.exists()
