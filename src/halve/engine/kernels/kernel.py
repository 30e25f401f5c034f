"""The interface of kernel families: everything that the engine needs to know about them.

To add a family, add a folder next to this file and one line to `registry.py`. The engine asks each family which
variants can run a layer, times them, and keeps weights packed for the families that it chose.
"""

import enum
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from halve.engine.kernels.planes import empty_planes, to_planes
from halve.engine.operations import Operation, Tensors


class Layout(enum.Enum):
    """The memory layout of images between layers."""

    ANY = "any"
    NHWC = "channels last"
    PLANES = "planes"  # see `planes.py`

    def of(self, x: Tensor, channel_dim: int = 1) -> Tensor:
        """Convert a tensor to this layout."""
        if self is Layout.PLANES:
            return to_planes(x, channel_dim)
        if self is Layout.NHWC and x.dim() == 4 and channel_dim == 1:
            return x.contiguous(memory_format=torch.channels_last)
        return x

    def empty(self, shape: Sequence[Any], channel_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor in this layout."""
        if self is Layout.PLANES:
            return empty_planes(shape, channel_dim, dtype, device)
        if self is Layout.NHWC and len(shape) == 4 and channel_dim == 1:
            return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=torch.channels_last)
        return torch.empty(tuple(shape), dtype=dtype, device=device)


class Kernel(NamedTuple):
    """A variant of a kernel family."""

    family: str
    variant: str

    def __str__(self) -> str:
        return f"{self.family} {self.variant}"


@dataclass(frozen=True)
class Piece:
    """What kernels are matched against: an operation of the fused graph, and what is known about its weight."""

    operation: Operation
    dtype: torch.dtype  # the compute dtype
    is_2_4: bool = False  # at most two nonzero weights in each block of four input channels


class Emitted(Protocol):
    """Machine code in memory. Layers with equal code share one object."""

    @property
    def size(self) -> int:
        """Bytes of memory that it takes."""


class Link(NamedTuple):
    """A layer of a chain. Values are numbered: the inputs of the chain, then the result of each layer."""

    operation: Operation
    kernel: Kernel
    packed: Tensors
    inputs: tuple[int, ...]


class ChainedLayer(NamedTuple):
    """A layer of a chain: see `Link`."""

    operation: str  # as JSON
    kernel: Kernel
    names: tuple[str, ...]  # of its packed tensors
    inputs: tuple[int, ...]


class ChainDescription(NamedTuple):
    """What a chain computes."""

    layers: tuple[ChainedLayer, ...]
    outputs: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(self)

    @staticmethod
    @functools.lru_cache(4096)
    def from_json(text: str) -> "ChainDescription":
        layers, outputs = json.loads(text)
        return ChainDescription(
            tuple(
                ChainedLayer(operation, Kernel(*kernel), tuple(names), tuple(inputs))
                for operation, kernel, names, inputs in layers
            ),
            tuple(outputs),
        )

    def links(self, packed: Iterable[Tensor]) -> list[Link]:
        """The layers with their packed tensors."""
        tensors = iter(packed)
        return [
            Link(
                Operation.from_json(layer.operation),
                layer.kernel,
                {name: next(tensors) for name in layer.names},
                layer.inputs,
            )
            for layer in self.layers
        ]


class KernelFamily(ABC):
    """A set of kernels that share their source and the packed form of the weights.

    In canonical form, `weight` has PyTorch's shape and the compute dtype, and `bias` at least single precision.
    `unpack(pack(tensors))` must restore them bit for bit: the engine only keeps the packed tensors that a plan needs.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool] = False  # skips the pruned weights of 2:4 layers
    library: ClassVar[bool] = False  # PyTorch or a vendor library, not a kernel of ours
    device_type: ClassVar[str | None] = None  # the only type of device that it runs on, such as "cuda"
    chain: ClassVar[str | None] = None  # families with the same one can run neighbouring layers in one call
    reads: ClassVar[Layout] = Layout.ANY
    writes: ClassVar[Layout] = Layout.ANY

    @property
    @abstractmethod
    def version(self) -> str:
        """A digest of everything that affects the speed of the kernels: sources and variants."""

    @abstractmethod
    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the family cannot run on this device in this dtype; None if it can."""

    @abstractmethod
    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        """The variants that can run the piece on a device where the family is available, possibly none."""

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        """Pack tensors for the kernels."""
        return dict(tensors)

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        """Restore the tensors in canonical form."""
        return dict(packed)

    def laid_out(self, inputs: Sequence[Tensor], operation: Operation) -> list[Tensor]:
        """Inputs in the layout that the kernels read."""
        return [self.reads.of(x, operation.channel_dim) for x in inputs]

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        """Whether the variant supports inputs of these shapes. If not, `run` computes the result in another way."""
        return True

    def promising(self, inputs: Sequence[Tensor], operation: Operation, variants: Sequence[str]) -> Sequence[str]:
        """Those of the variants, which all fit these inputs, that may be the fastest. Only these are timed."""
        return variants

    def compilation(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> partial[Any] | None:
        """A call that compiles what the variant needs for these inputs, possibly in another thread; None if nothing."""
        return None

    def inlined(self, variant: str) -> bool:
        """Whether the variant is plain PyTorch, which a compiler may fuse with what surrounds it."""
        return False

    @abstractmethod
    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        """Compute the result for inputs in the layout `reads`. Unsupported devices run a reference implementation."""

    def emitted(self, packed: Tensors, operation: Operation, variant: str) -> "Emitted | None":
        """The machine code that runs a layer on this machine, emitted now if it was not yet; None if there is none."""
        return None

    def can_chain(self, operation: Operation, shape: Sequence[int]) -> bool:
        """Whether the layer can be part of a chain for an input of this shape."""
        return False

    def run_chain(
        self, inputs: Sequence[Tensor], packed: Sequence[Tensor], chain: ChainDescription
    ) -> list[Tensor] | None:
        """Compute several layers of families with the same `chain` in one call; None if these inputs need single calls.

        Args:
            inputs: of the chain, in any layout.
            packed: the packed tensors of all layers.
            chain: its layers.
        """
        return None

    def fake(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation) -> Tensor:
        """An empty tensor with the shape and strides of the result."""
        x = inputs[0]
        return self.writes.empty(operation.out_shape(x.shape), operation.channel_dim, x.dtype, x.device)
