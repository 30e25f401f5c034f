"""A module recorded as CUDA graphs, one for each shape of its inputs; safe for several threads and streams.

All recordings of a model share their memory, so one runs at a time. What is returned is a copy: nothing that a caller
holds is written to later.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

MOST = 16  # recordings of one model; the oldest makes room
ALONE = threading.RLock()  # held while a network is planned and recorded: in a process one thread may record at a time
Shapes = tuple[tuple[int, ...], ...]
Recording = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any, tuple[Tensor, ...]]  # inputs, outputs, weights


class Recordings:
    """Of one module on one device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.planning = threading.RLock()  # held while layers change their ways; calls without a recording wait
        self.known: dict[Shapes, Recording] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None
        self.last: torch.cuda.Stream | None = None

    def record(
        self, run: Callable[..., Any], inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...] = ()
    ) -> list[Shapes]:
        """Record a run on inputs of these shapes; what had to make room for it is returned.

        It reads the weights by address: they are kept as long as it is.
        """
        device = inputs[0].device
        with self.lock, torch.cuda.device(device), torch.no_grad():
            torch.cuda.synchronize()
            if self.stream is None:
                self.stream = torch.cuda.Stream()
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            places = tuple(x.clone(memory_format=torch.preserve_format) for x in inputs)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(2):
                    run(*places)
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = run(*places)
            torch.cuda.synchronize()
            self.known.pop(shapes_of(inputs), None)
            gone = list(self.known)[: max(len(self.known) - MOST + 1, 0)]
            for shapes in gone:
                del self.known[shapes]
            self.known[shapes_of(inputs)] = graph, places, outputs, weights
            return gone

    def of(self, inputs: tuple[Tensor, ...]) -> Recording | None:
        return self.known.get(shapes_of(inputs))

    def replay(self, inputs: tuple[Tensor, ...], recording: Recording | None = None) -> Any:
        """The outputs for these inputs, on the current stream. A recording that was found may have made room since."""
        with self.lock, _on(inputs[0].device):
            graph, places, outputs, _ = recording or self.known[shapes_of(inputs)]
            stream = torch.cuda.current_stream()
            if self.done is not None and self.last != stream:
                stream.wait_event(self.done)  # whoever ran before may still read and write the shared memory
            for place, x in zip(places, inputs, strict=True):
                place.copy_(x)
            graph.replay()
            result = pytree.tree_map_only(Tensor, torch.clone, outputs)
            self.done, self.last = self.done or torch.cuda.Event(), stream
            self.done.record(stream)
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recordings":
        return Recordings()  # a recording holds addresses: a copy makes its own

    def __reduce__(self) -> Any:
        return Recordings, ()


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On that device; nothing to do where it is the current one, as nearly always."""
    return contextlib.nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def shapes_of(inputs: tuple[Tensor, ...]) -> Shapes:
    return tuple(tuple(x.shape) for x in inputs)
