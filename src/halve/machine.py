"""The devices of this machine: their names, and what its CPU can do."""

import functools
import platform
import sys
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")
_X86 = ("x86_64", "AMD64")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # instructions for products in bfloat16


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
def cpu_flags() -> frozenset[str]:
    """The instruction sets that processor and operating system support, by their names in /proc/cpuinfo."""
    if sys.platform != "linux" or platform.machine() not in _X86:
        return frozenset()
    try:
        text = _CPU_INFO.read_text()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in text.splitlines() if line.startswith("flags")), frozenset())


def fast_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16: NVIDIA GPUs, and some x86 CPUs.

    >>> fast_in_bfloat16(torch.device("cuda"))
    True
    """
    return device.type == "cuda" or (device.type == "cpu" and not cpu_flags().isdisjoint(_BFLOAT16))


@functools.cache
def _processor() -> str:
    """The model of the CPU where Linux names it, otherwise its architecture."""
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
