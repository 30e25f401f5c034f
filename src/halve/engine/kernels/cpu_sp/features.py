"""What the processor can do, as the operating system reports it."""

import functools
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from halve.engine.kernels.cpu_sp.arithmetic import Arithmetic

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


def unavailable(device: torch.device, dtype: torch.dtype, supported: Mapping[torch.dtype, Arithmetic]) -> str | None:
    """Why our code cannot run on this device in this dtype; None if it can."""
    if device.type != "cpu":
        return f"our CPU kernels need a CPU, got {device.type}"
    if dtype not in supported:
        return f"our CPU kernels need {' or '.join(map(str, supported))}, got {dtype}"
    lacking = [flag for flag in supported[dtype].flags if flag not in cpu_flags()]
    return f"our CPU kernels need AVX-512 in {dtype}: this CPU has no {', '.join(lacking)}" if lacking else None
