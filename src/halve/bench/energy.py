"""GPU energy, from the driver's counter (NVML). Read through ctypes, so it needs no extra package."""

import ctypes
from collections.abc import Callable

import torch

Meter = Callable[[], int]  # returns the millijoules the GPU has used since the driver was loaded


def energy_meter(device: torch.device) -> Meter | None:
    """The energy counter of a GPU, or None where there is none: on CPUs, without NVML, before Volta, on MIG slices.

    >>> energy_meter(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        # Look it up by UUID: CUDA_VISIBLE_DEVICES renumbers GPUs for CUDA, but not for NVML.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None

    def read() -> int:
        count = ctypes.c_ulonglong()
        if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(count)):
            raise OSError("NVML does not report the energy of this GPU")
        return count.value

    try:
        read()
    except (OSError, AttributeError):
        return None
    return read
