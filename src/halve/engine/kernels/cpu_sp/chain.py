"""Several layers as one call: what they write for each other stays in one block of memory, and mostly in the cache.

Threads are started once for all layers. With several images, layers with few weights and many pixels run image by
image, each thread with images of its own: what one layer writes is still in the cache when the next one reads it.
Layers with many weights run on all images at once, since each image would fetch them from memory again.
"""

import itertools
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from halve.engine.kernels.cpu_sp.features import AVX512
from halve.engine.kernels.cpu_sp.geometry import Geometry, geometry, splitting
from halve.engine.kernels.cpu_sp.memory import empty
from halve.engine.kernels.cpu_sp.packing import Packed
from halve.engine.kernels.cpu_sp.pool import pool_phase
from halve.engine.kernels.cpu_sp.program import (
    CACHED_BYTES,
    EMITTED,
    Program,
    checked_out_shape,
    program_for,
    sources_of,
)
from halve.engine.kernels.cpu_sp.worker import LANES, Operand, Phase, Schedule, Together
from halve.engine.kernels.kernel import ChainDescription
from halve.engine.kernels.planes import has_rows, pitch_for, strides_of, to_planes
from halve.engine.operations import Convolution, Linear, MaxPool, Operation, PooledConvolution
from halve.errors import EngineError

_ALIGNMENT = 4096  # of values in memory, in bytes
_MAX_SHAPES = 16  # that a chain remembers
_MOST_IDLE = 0.1  # of all threads' time, while the last images run


def can_chain(operation: Operation, shape: Sequence[int]) -> bool:
    """Whether a layer can be part of a chain for an input of this shape."""
    if isinstance(operation, PooledConvolution):
        pooled = operation.convolution.out_shape(shape)
        return can_chain(operation.convolution, shape) and can_chain(operation.pool, pooled)
    if isinstance(operation, Linear):
        return operation.activation in EMITTED
    if not isinstance(operation, Convolution | MaxPool) or getattr(operation, "activation", "none") not in EMITTED:
        return False
    window = geometry(operation, shape[0], shape[2], shape[3])
    return window.direct or window.halves is not None


def run_chain(inputs: Sequence[Tensor], packed: Sequence[Tensor], chain: ChainDescription) -> list[Tensor] | None:
    """Run layers on inputs of any layout. None if some layer cannot be part of a chain, or dtypes differ.

    Emits code on first use, and again if weights have changed.
    """
    sources = sources_of(packed)
    key = (id(packed[0]) if packed else 0, id(chain))
    found = _chains.get(key)
    if found is None or found.sources != sources or found.description is not chain:
        with _lock:
            found = Chain(len(inputs), chain, packed, sources)
            _chains[key] = found
            if packed:
                found.reference = WeakIdRef(packed[0], lambda _: _chains.pop(key, None))
    return found.run(inputs)


def _checked_shape(operation: Operation, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a result. Raises `EngineError` if inputs do not fit the layer."""
    shape, residual = shapes[0], shapes[1] if len(shapes) > 1 else None
    if isinstance(operation, Convolution | Linear):
        return checked_out_shape(operation, shape, residual)
    if len(shape) != 4 or min(shape) < 1:
        raise EngineError(f"pooling needs images of shape (N, C, H, W), got {shape}")
    return operation.out_shape(shape)


class _Link(NamedTuple):
    """A layer or pooling, with its result."""

    work: Program | MaxPool
    inputs: tuple[int, ...]
    result: int

    @property
    def operation(self) -> Convolution | Linear | MaxPool:
        return self.work.operation if isinstance(self.work, Program) else self.work

    def window(self, shape: Sequence[int]) -> Geometry:
        if isinstance(self.work, Program):
            return self.work.window(shape)
        return geometry(self.work, shape[0], shape[2], shape[3])


class Chain:
    """Layers that run one after the other, in one dtype."""

    reference: object = None  # to a tensor that it lives as long as

    def __init__(
        self, inputs: int, description: ChainDescription, packed: Sequence[Tensor], sources: tuple[object, ...] = ()
    ) -> None:
        """Emit the code of all layers.

        Args:
            inputs: number of inputs.
            description: the layers.
            packed: their packed tensors.
            sources: what identifies these.
        """
        self.description, self.sources = description, sources
        self._outputs = description.outputs
        links = description.links(packed)
        self._links: list[_Link] = []
        extra = itertools.count(inputs + len(links))  # results of convolutions that are pooled
        for number, link in enumerate(links):
            result, operation = inputs + number, link.operation
            if not all(0 <= value < result for value in link.inputs):
                raise EngineError(f"a chain reads value {max(link.inputs)} before it is computed")
            if isinstance(operation, MaxPool):
                self._links.append(_Link(operation, link.inputs, result))
                continue
            pooled = isinstance(operation, PooledConvolution)
            layer = operation.convolution if isinstance(operation, PooledConvolution) else operation
            weights = Packed(link.packed["values"], link.packed.get("codes"))
            program = program_for(layer, weights, link.packed.get("bias"), link.packed.get("scale"), AVX512)  # type: ignore[arg-type]
            self._links.append(_Link(program, link.inputs, next(extra) if pooled else result))
            if isinstance(operation, PooledConvolution):
                self._links.append(_Link(operation.pool, (self._links[-1].result,), result))
        self._prepared: dict[object, _Prepared | None] = {}
        self._in_rows, self._channel_dims = [], []
        for number in range(inputs):  # layers read planes, or at least rows if they split the input into planes anyway
            users = [link for link in self._links if number in link.inputs]
            strided = all(getattr(link.operation, "stride", (1, 1)) != (1, 1) for link in users)
            self._in_rows.append(strided and not any(number in link.inputs[1:] for link in users))
            self._channel_dims.append(users[0].operation.channel_dim)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """The outputs; None if a layer cannot be part of a chain on these inputs."""
        given = [
            x if in_rows and has_rows(x) else to_planes(x, dim)
            for x, in_rows, dim in zip(inputs, self._in_rows, self._channel_dims, strict=True)
        ]
        key = (tuple((x.shape, x.stride(), x.dtype) for x in given), torch.get_num_threads())
        if key not in self._prepared:
            if len(self._prepared) >= _MAX_SHAPES:
                self._prepared.clear()
            self._prepared[key] = self.prepare(given)
        prepared = self._prepared[key]
        if prepared is None:
            return None
        storages = [empty(result.numbers, given[0].dtype) for result in prepared.results]
        memory = empty(prepared.bytes, torch.uint8)
        prepared.schedule(*(x.data_ptr() for x in (*given, *storages, memory)))
        return [
            storage.as_strided(result.shape, result.strides)
            for storage, result in zip(storages, prepared.results, strict=True)
        ]

    def prepare(self, inputs: Sequence[Tensor]) -> "_Prepared | None":
        """How to run on inputs like these, stored as planes. Raises `EngineError` if they do not fit the layers."""
        shapes = {number: tuple(x.shape) for number, x in enumerate(inputs)}
        for link in self._links:
            given = [shapes[value] for value in link.inputs]
            shapes[link.result] = _checked_shape(link.operation, given)
            if not can_chain(link.operation, given[0]):
                return None
        if len({x.dtype for x in inputs}) > 1:
            return None
        return _Plan(self._links, self._outputs, inputs, shapes).prepared()


_chains: dict[tuple[int, int], Chain] = {}
_lock = threading.Lock()


class _Result(NamedTuple):
    numbers: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Prepared(NamedTuple):
    """How to run on inputs of some shapes. Addresses are those of inputs, results, and memory for all other values."""

    schedule: Schedule
    results: list[_Result]
    bytes: int


class _Memory:
    """Places in a block of memory, used again when they are free."""

    def __init__(self) -> None:
        self.size = 0
        self._taken: dict[object, tuple[int, int]] = {}

    def take(self, owner: object, size: int) -> int:
        """A place of this size: the first gap that is large enough."""
        place, size = 0, -(-size // _ALIGNMENT) * _ALIGNMENT
        for start, end in sorted(self._taken.values()):
            if start - place >= size:
                break
            place = max(place, end)
        self._taken[owner] = place, place + size
        self.size = max(self.size, place + size)
        return place

    def free(self, owner: object) -> None:
        self._taken.pop(owner, None)


class _Plan:
    """Puts values into memory, and layers into phases."""

    def __init__(
        self,
        links: Sequence[_Link],
        outputs: Sequence[int],
        inputs: Sequence[Tensor],
        shapes: dict[int, tuple[int, ...]],
    ) -> None:
        self._shapes = shapes
        self._links, self._outputs, self._given = links, outputs, inputs
        self._size = inputs[0].element_size()
        self._workers = torch.get_num_threads()
        self._last_use = {value: at for at, link in enumerate(links) for value in (*link.inputs, link.result)}
        self._memory = _Memory()
        self._block = len(inputs) + len(outputs)  # the number of its address
        self._operands: dict[int, Operand] = {}
        for number, x in enumerate(inputs):
            pitch = x.stride(self._channel_dim(number))
            image = x.stride(0) if x.dim() == 4 else 0
            self._operands[number] = Operand(number, 0, self._size * pitch, self._size * image)

    def prepared(self) -> _Prepared:
        results = []
        for number, value in enumerate(self._outputs):
            strides, numbers = strides_of(self._shapes[value], self._channel_dim(value))
            results.append(_Result(numbers, self._shapes[value], strides))
            self._operands[value] = self._planes(value, len(self._given) + number, 0)
        phases: list[Phase | Together] = []
        for first, end in self._groups():
            if end - first > 1:
                phases.append(self._together(first, end))
            else:
                phases += self._alone(first)
        schedule = Schedule(phases, self._size * LANES, self._workers)
        return _Prepared(schedule, results, max(self._memory.size, 1))

    def _channel_dim(self, value: int) -> int:
        return next(link.operation.channel_dim for link in self._links if value in (*link.inputs, link.result))

    def _planes(self, value: int, address: int, offset: int) -> Operand:
        """A value for all images."""
        shape, dim = self._shapes[value], self._channel_dim(value)
        pixels = math.prod(shape) // shape[dim]
        image = pixels // shape[0] if dim == 1 else 0
        return Operand(address, offset, self._size * pitch_for(pixels), self._size * image)

    def _groups(self) -> list[tuple[int, int]]:
        """Ranges of layers that run image by image; other layers are ranges of one."""
        found: list[tuple[int, int]] = []
        joined = False
        for at, link in enumerate(self._links):
            joins = self._by_image(link)
            if joins and joined:
                found[-1] = found[-1][0], at + 1
            else:
                found.append((at, at + 1))
            joined = joins
        return found

    def _by_image(self, link: _Link) -> bool:
        """Whether a layer may run image by image: images end with whole vectors, and code stays in the cache."""
        shape = self._shapes[link.result]
        if link.operation.channel_dim != 1 or shape[0] < 2 or shape[2] * shape[3] % LANES:
            return False
        rounds = -(-shape[0] // self._workers)
        idle = 1 - shape[0] / (rounds * self._workers)
        return idle <= _MOST_IDLE and (not isinstance(link.work, Program) or link.work.bytes <= CACHED_BYTES)

    def _alone(self, at: int) -> list[Phase]:
        """The phases of a layer on all images."""
        link = self._links[at]
        if link.result not in self._operands:
            place = self._memory.take(link.result, self._bytes(self._shapes[link.result], link))
            self._operands[link.result] = self._planes(link.result, self._block, place)
        shape = self._shapes[link.inputs[0]]
        window, planes = link.window(shape), None
        if not window.direct:
            pitch, size = self._copied(window, shape[1])
            planes = Operand(self._block, self._memory.take("copy", size), pitch)
        found = self._phases(link, window, planes, self._workers)
        self._memory.free("copy")
        self._free(at)
        return found

    def _together(self, first: int, end: int) -> Together:
        """Layers that run image by image. What only they read is in memory of each thread, the rest for all images."""
        slots, local = _Memory(), []
        for at in range(first, end):
            link = self._links[at]
            if link.result in self._operands:
                continue
            if self._last_use[link.result] < end:
                local.append(link.result)
            else:
                place = self._memory.take(link.result, self._bytes(self._shapes[link.result], link))
                self._operands[link.result] = self._planes(link.result, self._block, place)
        phases: list[tuple[_Link, Geometry, int, int]] = []
        places = {}
        for at in range(first, end):
            link = self._links[at]
            if link.result in local:
                places[link.result] = slots.take(link.result, self._bytes((1, *self._shapes[link.result][1:]), link))
            shape = (1, *self._shapes[link.inputs[0]][1:])
            window, place, pitch = link.window(shape), 0, 0
            if not window.direct:
                pitch, size = self._copied(window, shape[1])
                place = slots.take("copy", size)
                slots.free("copy")
            phases.append((link, window, place, pitch))
            for value in local:
                if self._last_use[value] == at:
                    slots.free(value)
        block = self._memory.take("slots", slots.size * self._workers)
        for value, place in places.items():
            height, width = self._shapes[value][2:]
            pitch = self._size * pitch_for(height * width)
            self._operands[value] = Operand(self._block, block + place, pitch, slot=slots.size)
        found = []
        for link, window, place, pitch in phases:
            planes = None if window.direct else Operand(self._block, block + place, pitch, slot=slots.size)
            found += self._phases(link, window, planes, 1)
        self._memory.free("slots")
        for at in range(first, end):
            self._free(at)
        return Together(found, self._shapes[self._links[first].result][0])

    def _phases(self, link: _Link, window: Geometry, planes: Operand | None, workers: int) -> list[Phase]:
        """The phases of a layer whose operands are known. Images are split into `planes` first, if there are any."""
        shape, found = self._shapes[link.inputs[0]], []
        x, out = self._operands[link.inputs[0]], self._operands[link.result]
        if planes is not None:
            strides = x.image // self._size, x.pitch // self._size
            pitch = planes.pitch // self._size
            channels, height, width = shape[1:]
            found.append(splitting(window, channels, height, width, strides, pitch, x, planes, self._size, workers))
            x = planes
        if isinstance(link.work, Program):
            residual = self._operands[link.inputs[1]] if len(link.inputs) > 1 else None
            found.append(link.work.phase(window, x, out, residual, workers))
        else:
            found.append(pool_phase(window, shape[1], x, out, self._size))
        return found

    def _free(self, at: int) -> None:
        link = self._links[at]
        for value in (*link.inputs, link.result):
            if self._last_use[value] <= at and value not in self._outputs:
                self._memory.free(value)

    def _bytes(self, shape: Sequence[int], link: _Link) -> int:
        numbers: int = strides_of(shape, link.operation.channel_dim)[1]
        return self._size * numbers

    def _copied(self, window: Geometry, channels: int) -> tuple[int, int]:
        """The pitch of the planes that a layer copies its input to, and their size, both in bytes."""
        pitch = self._size * pitch_for(window.images * window.out[0] * window.out[1])
        return pitch, pitch * channels * len(window.planes)
