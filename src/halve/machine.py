"""The devices of this machine, by name."""

import functools
import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU with the number of threads that PyTorch uses.

    >>> device_name(torch.device("cpu")).endswith("threads")
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def device_names() -> list[str]:
    """The names of all devices of this machine."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device_name(device) for device in (*gpus, torch.device("cpu"))]


@functools.cache
def _processor() -> str:
    """The model of the CPU where Linux names it, otherwise its architecture."""
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
