"""Setup for tests of the engine."""

import pytest

from halve.engine.kernels.registry import FAMILIES
from tests.engine.timers import use_timer


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Make kernels available on a CPU in any dtype, with fake timings; returns the names of what was timed."""
    for name in ("mma_sp", "mma"):
        monkeypatch.setattr(type(FAMILIES[name]), "unavailable", lambda self, device, dtype: None)
        monkeypatch.setattr(
            type(FAMILIES[name]), "variants", lambda self, piece, device: ["64x64"] if piece.is_2_4 else []
        )
    asked = []

    def made_up(calls, device):
        for call in calls.values():
            call()
        asked.append(list(calls))
        return {name: float(number) for number, name in enumerate(calls)}

    use_timer(monkeypatch, made_up)
    return asked
