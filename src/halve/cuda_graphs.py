"""Record CUDA graphs: the one place that knows how, for learning, planning and running."""

import contextlib
import functools
import gc
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
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record one call of `run` as a CUDA graph; returns the graph and what the call returned.

    The call runs `warmups` times first, since libraries choose and load their kernels on first use, which cannot be
    recorded. Errors of other threads do not break the recording.
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
    try:
        with _no_garbage_collection(), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            result = run()
    finally:
        torch._C._cuda_clearCublasWorkspaces()  # what the graph owns must not serve others
    return graph, result


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that recordings run on: one per device, since cuBLAS keeps a workspace for each stream for good."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def autotuned_cudnn() -> Iterator[None]:
    """Let cuDNN try its algorithms on each new shape and keep the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing tensors of other streams while a graph is recorded would break the recording.

    Collecting first is not needed for that, and takes half a second where torch.export has left many objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
