"""Setup for all tests."""

import signal


def pytest_configure() -> None:
    """Restore the SIGINT handler: shells ignore the signal in background jobs, and subprocesses inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
