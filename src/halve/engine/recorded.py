"""CUDA graphs of a module, one per input shape. Safe to call from several threads and streams.

All recordings of a module share a memory pool, so only one runs at a time. Callers get copies of the outputs, which
later calls do not overwrite.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from halve.cuda_graphs import record

MAX_RECORDINGS = 16  # per module; the oldest is dropped
CAPTURE_LOCK = threading.RLock()  # CUDA graph capture is process-wide: only one thread may capture at a time
Shapes = tuple[tuple[int, ...], ...]
Recording = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any, tuple[object, ...]]  # inputs, outputs, weights


class Recordings:
    """The recordings of one module on one device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.planning = threading.RLock()  # held while layers switch kernels; calls without a recording wait
        self.known: dict[Shapes, Recording] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None
        self.last: torch.cuda.Stream | None = None

    def record(
        self, run: Callable[..., Any], inputs: tuple[Tensor, ...], weights: tuple[object, ...] = ()
    ) -> list[Shapes]:
        """Record `run` on inputs of these shapes; returns the shapes whose recordings were dropped.

        A recording reads the weights by address, so it keeps them, or what holds them, alive.
        """
        device = inputs[0].device
        # Tensors of inference mode could not be written to outside of it.
        with self.lock, torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            torch.cuda.synchronize()
            if self.stream is None:
                self.stream = torch.cuda.Stream()
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            held = tuple(x.clone(memory_format=torch.preserve_format) for x in inputs)
            pool, self.pool = self.pool, None  # not used again if recording fails
            graph, outputs = record(lambda: run(*held), device, warmups=2, pool=pool, stream=self.stream)
            self.pool = pool
            torch.cuda.synchronize()
            self.known.pop(shapes_of(inputs), None)
            dropped = list(self.known)[: max(len(self.known) - MAX_RECORDINGS + 1, 0)]
            for shapes in dropped:
                del self.known[shapes]
            self.known[shapes_of(inputs)] = graph, held, outputs, weights
            return dropped

    def of(self, inputs: tuple[Tensor, ...]) -> Recording | None:
        return self.known.get(shapes_of(inputs))

    def replay(self, inputs: tuple[Tensor, ...], recording: Recording | None = None) -> Any:
        """Replay a recording on the current stream; returns the outputs. `recording` may already have been dropped."""
        with self.lock, _on(inputs[0].device):
            graph, held, outputs, _ = recording or self.known[shapes_of(inputs)]
            stream = torch.cuda.current_stream()
            if self.done is not None and self.last != stream:
                stream.wait_event(self.done)  # the previous caller's stream may still use the shared memory
            for place, x in zip(held, inputs, strict=True):
                place.copy_(x)
            graph.replay()
            result = pytree.tree_map_only(Tensor, torch.clone, outputs)
            self.done, self.last = self.done or torch.cuda.Event(), stream
            self.done.record(stream)
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recordings":
        return Recordings()  # recordings hold addresses: a copy must record again

    def __reduce__(self) -> Any:
        return Recordings, ()


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch to a device, unless it is already current."""
    return contextlib.nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def shapes_of(inputs: tuple[Tensor, ...]) -> Shapes:
    return tuple(tuple(x.shape) for x in inputs)
