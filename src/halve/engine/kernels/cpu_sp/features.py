"""What the processor can do, as the operating system reports it."""

import functools
import platform
import sys
from pathlib import Path

_ASSEMBLED = ("x86_64", "AMD64")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets that processor and operating system support, by their names in /proc/cpuinfo."""
    if sys.platform != "linux" or platform.machine() not in _ASSEMBLED:
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in text.splitlines() if line.startswith("flags")), frozenset())


def missing(*needed: str) -> str | None:
    """Which of these instruction sets the processor lacks, in words; None if it has all."""
    lacking = [flag for flag in needed if flag not in cpu_flags()]
    return f"this CPU ({platform.machine()}) has no {', '.join(lacking)}" if lacking else None
