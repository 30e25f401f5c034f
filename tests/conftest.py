"""Setup for all tests."""

import signal
from collections.abc import Iterator

import pytest
import torch

from halve import machine
from halve.engine import compiled
from halve.engine.kernels.cpu_sp import features
from halve.engine.kernels.registry import no_sparse_kernels

_cpu_flags = features.cpu_flags


def pytest_configure() -> None:
    """Restore the SIGINT handler, hide what only some CPUs can do, and use Inductor on CPUs only where a test asks.

    Shells ignore the signal in background jobs, and subprocesses inherit that. Without CPU kernels and bfloat16, tests
    do the same on all CPUs; tests marked `cpu_kernels` see the kernels. Inductor takes seconds for each network.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    features.cpu_flags = machine.cpu_flags = frozenset  # type: ignore[assignment]
    compiled.by_default = lambda device: device.type == "cuda"


@pytest.fixture
def few_letters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the built-in letters be so few that training on them takes a second."""
    from halve.sources import letters

    monkeypatch.setattr(letters, "IMAGES", {"train": 2048, "test": 512})
    letters.letters.cache_clear()
    yield
    letters.letters.cache_clear()


@pytest.fixture(autouse=True)
def cpu_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the CPU kernels to tests that are marked so."""
    if request.node.get_closest_marker("cpu_kernels") is not None:
        monkeypatch.setattr(features, "cpu_flags", _cpu_flags)
        if (reason := no_sparse_kernels(torch.device("cpu"), torch.float32)) is not None:
            pytest.skip(reason)
