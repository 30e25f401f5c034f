"""How much bounds compute at a time: on a CPU what fits into its cache, on a GPU into its memory.

Bounds do not depend on it, but for rounding, which they include.
"""

import functools

import torch

_CACHE = 1 << 21  # coefficients
# On a GPU: bytes for each number, with its copies and what is computed from it, and the most that is still faster.
_BYTES = {"coefficients": 512, "kept": 64}
_MOST = {"coefficients": 1 << 26, "kept": 1 << 30}


@functools.cache
def _fitting(device: torch.device, numbers: str) -> int:
    """How many numbers fit into what no other program has of a GPU's memory."""
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return min(_MOST[numbers], int(free) // _BYTES[numbers])


def coefficients(device: torch.device) -> int:
    """How many coefficients to carry back through a network at a time.

    >>> coefficients(torch.device("cpu"))
    2097152
    """
    return _CACHE if device.type == "cpu" else _fitting(device, "coefficients")


def kept(device: torch.device) -> int:
    """How many coefficients of all nodes together to keep, where gradients need them: each takes about 32 bytes."""
    return 4 * _CACHE if device.type == "cpu" else _fitting(device, "kept")


def windows(device: torch.device) -> int:
    """How many numbers of the windows of a convolution to write at a time; on a GPU, 32-bit indices suffice."""
    return 12 * coefficients(device)


def derivatives(device: torch.device) -> int:
    """How many derivatives by weights to compute at a time."""
    return _CACHE // 4 if device.type == "cpu" else 2 * coefficients(device)
