"""What a GPU has used: the driver's own counter (NVML), read through ctypes so that nothing has to be installed."""

import ctypes
from collections.abc import Callable

import torch

Meter = Callable[[], int]  # millijoules since the driver was loaded, of the whole GPU


def meter_of(device: torch.device) -> Meter | None:
    """A GPU's counter; None on a CPU, without NVML, and on GPUs that do not count (older than Volta, parts of one).

    >>> meter_of(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers GPUs for CUDA alone.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None

    def read() -> int:
        count = ctypes.c_ulonglong()
        if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(count)):
            raise OSError("NVML does not tell the energy of this GPU")
        return count.value

    try:
        read()
    except (OSError, AttributeError):
        return None
    return read
