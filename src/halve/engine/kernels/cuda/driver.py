"""Load and launch compiled kernels through the CUDA driver API, with ctypes only.

PyTorch owns the context, the memory and the streams. Kernels launch on PyTorch's current stream.
"""

import ctypes
import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from halve.errors import EngineError

_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MIN_CAPABILITY = (8, 0)  # the first with sparse tensor cores


def unavailable(device: torch.device) -> str | None:
    """Why sparse tensor cores cannot be used on a device; None if they can."""
    if device.type != "cuda":
        return f"sparse tensor cores need an NVIDIA GPU, got {device.type}"
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA: install a CUDA build"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}; sparse tensor cores need 8.0 or newer"
    return None


@functools.cache
def processors(device: int) -> int:
    """The number of streaming multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def architecture(device: int) -> str:
    """The architecture to compile for, such as "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


class Kernel:
    """A kernel loaded on one device."""

    def __init__(self, code: bytes, name: str, device: int, shared_bytes: int) -> None:
        self.device, self.shared_bytes = device, shared_bytes
        self._can_depend = torch.cuda.get_device_capability(device) >= (9, 0)
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if shared_bytes > limit:
            raise EngineError(
                f"kernel {name} needs {shared_bytes} bytes of shared memory per block, the device has {limit}"
            )
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # initializes PyTorch's context
            _enter_context(device)
            self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
            call("cuModuleLoadData", ctypes.byref(self._module), code)
            call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
            call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes)

    def resident_blocks(self, threads: int) -> int:
        """How many blocks of so many threads a multiprocessor holds at the same time."""
        count = ctypes.c_int()
        with torch.cuda.device(self.device):
            _enter_context(self.device)
            limits = (ctypes.c_int(threads), ctypes.c_size_t(self.shared_bytes))
            call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(count), self._function, *limits)
        return count.value

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | ctypes.Structure | None],
        cluster: int = 1,
    ) -> None:
        """Launch the kernel on the current stream. Tensors are passed as pointers, None as a null pointer.

        `cluster` neighbouring blocks share their shared memory.

        While a CUDA graph is recorded, the launch is a dependent one: the kernel may start before the previous one is
        done, and waits for it itself. Only there, as weights do not change within a recording.
        """
        held = [a if isinstance(a, ctypes.Structure) else ctypes.c_void_p(_address(a)) for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(a) for a in held))
        wanted: dict[int, tuple[int, ...]] = {}
        if cluster > 1:
            wanted[_CLUSTER_DIMENSION] = (cluster, 1, 1)
        with torch.cuda.device(self.device):  # another device may be current
            _enter_context(self.device)
            if self._can_depend and torch.cuda.is_current_stream_capturing():
                wanted[_PROGRAMMATIC_STREAM_SERIALIZATION] = (1,)
            attributes = (_Attribute * 2)(*(_Attribute(i, 0, (ctypes.c_int * 16)(*v)) for i, v in wanted.items()))
            config = _Config(
                *(*grid, 1, threads, 1, 1, self.shared_bytes),
                torch.cuda.current_stream().cuda_stream,
                attributes,
                len(wanted),
            )
            call("cuLaunchKernelEx", ctypes.byref(config), self._function, pointers, None)


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _enter_context(device: int) -> None:
    """Make PyTorch's context current. New threads have none until PyTorch first uses CUDA in them."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        call("cuDeviceGet", ctypes.byref(handle), device)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        call("cuCtxSetCurrent", context)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver API; raise `EngineError` if it fails."""
    result = getattr(_library(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(result, ctypes.byref(text))
        raise EngineError(f"{name} failed: {text.value.decode() if text.value else f'error {result}'}")


@functools.cache
def _library() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise EngineError(f"cannot load the NVIDIA driver ({name}): {error}") from error
