"""Record CUDA graphs, for learning, planning and inference."""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


def record(
    run: Callable[[], Any],
    device: torch.device,
    *,
    warmups: int = 1,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    free_memory: bool = True,
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record a call of `run` as a CUDA graph; returns the graph and the result of the call.

    Args:
        run: the function to record.
        device: the GPU.
        warmups: how often to call `run` first. Libraries load kernels on first use, which cannot be recorded.
        pool: a memory pool to share with other graphs. Do not use it again if recording fails: PyTorch may not have
            released it. Default: a new one.
        stream: the stream to record on. Default: `side_stream(device)`.
        free_memory: return cached memory to the GPU first, as nothing can be returned while recording. Takes
            milliseconds, and allocating again takes more.

    CUDA calls in other threads do not invalidate the recording.
    """
    stream = side_stream(device) if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # cuBLAS keeps a workspace per stream. One from before the recording would not belong to the graph: whoever clears
    # workspaces later, as torch.compile does, would free memory that the graph still writes to.
    torch._C._cuda_clearCublasWorkspaces()
    if free_memory:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    try:
        with _no_garbage_collection(), torch.cuda.stream(stream), _capture(graph, pool):
            result = run()
    except BaseException:
        _end_capture_of_random_numbers(stream)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()  # what the graph owns must not serve others
    return graph, result


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is launched on the current stream. Unlike `torch.cuda.graph`, does not empty the memory cache."""
    stream = torch.cuda.current_stream()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        try:
            graph.capture_end()
        except RuntimeError:
            _end_allocation(stream, pool)
            raise


def _end_allocation(stream: torch.cuda.Stream, pool: Any) -> None:
    """Let the allocator know that a recording that CUDA aborted has ended.

    Older versions of PyTorch do not: their allocator would refuse to return cached memory, or to use this pool again.
    """
    with contextlib.suppress(RuntimeError, AttributeError), torch.cuda.stream(stream):  # newer versions have done it
        if not torch.cuda.is_current_stream_capturing():
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)


def _end_capture_of_random_numbers(stream: torch.cuda.Stream) -> None:
    """Record nothing. A recording that CUDA aborts leaves PyTorch's generator in capture mode, where it raises."""
    with (
        warnings.catch_warnings(action="ignore"),  # it warns that the graph is empty
        torch.cuda.stream(stream),
        _capture(torch.cuda.CUDAGraph(), None),
    ):
        pass


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to record on. One per device, since cuBLAS never frees its workspace for a stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def autotuned_cudnn() -> Iterator[None]:
    """Enable cuDNN's autotuner: it benchmarks its algorithms on each new shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: freeing tensors of other streams would invalidate the recording.

    Collecting first is not needed for that, and takes half a second after torch.export has left many objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
