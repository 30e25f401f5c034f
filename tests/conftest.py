"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    """Ctrl-C works also where the suite is a shell's background job: such jobs ignore it, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
