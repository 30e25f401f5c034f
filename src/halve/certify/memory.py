"""How much bounds compute at a time: on a CPU what fits into its cache, on a GPU into its memory.

Bounds do not depend on it, but for rounding, which they include.
"""

import functools

import torch

_CACHE = 1 << 21  # coefficients
_LEAST, _MOST = 1 << 16, 1 << 26  # on a GPU; more is not faster, and windows of more exceed 32-bit indices
_BYTES = 512  # of a GPU's memory for each coefficient: it is read, written, and there are copies and windows of it


@functools.cache
def coefficients(device: torch.device) -> int:
    """How many coefficients to carry back through a network at a time.

    >>> coefficients(torch.device("cpu"))
    2097152
    """
    if device.type != "cuda":
        return _CACHE
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)  # the rest is used by others
    return max(_LEAST, min(_MOST, int(free) // _BYTES))


def kept(device: torch.device) -> int:
    """How many coefficients of all nodes together to keep, where gradients need them."""
    return coefficients(device) * (16 if device.type == "cuda" else 4)


def windows(device: torch.device) -> int:
    """How many numbers of the windows of a convolution to write at a time."""
    return coefficients(device) * 12


def derivatives(device: torch.device) -> int:
    """How many derivatives by weights to compute at a time."""
    return coefficients(device) * 2 if device.type == "cuda" else coefficients(device) // 4
