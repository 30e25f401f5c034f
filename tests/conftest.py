"""Setup for all tests."""

import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Restore the SIGINT handler: shells ignore the signal in background jobs, and subprocesses inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def few_letters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the built-in letters be so few that training on them takes a second."""
    from halve.sources import letters

    monkeypatch.setattr(letters, "IMAGES", {"train": 2048, "test": 512})
    letters.letters.cache_clear()
    yield
    letters.letters.cache_clear()
