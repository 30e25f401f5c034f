"""The interface of kernel families: everything that the engine needs to know about them.

To add a family, add a folder next to this file and one line to `registry.py`. The engine asks each family which
variants can run a layer, times them, and keeps weights packed for the families that it chose.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from halve.engine.operations import Linear, Operation, Tensors


class Layout(enum.Enum):
    """The memory layout of images between layers."""

    ANY = "any"
    NHWC = "channels last"

    def of(self, x: Tensor) -> Tensor:
        """Convert a tensor to this layout."""
        if self is Layout.NHWC and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x


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


class KernelFamily(ABC):
    """A set of kernels that share their source and the packed form of the weights.

    In canonical form, `weight` has PyTorch's shape and the compute dtype, and `bias` at least single precision.
    `unpack(pack(tensors))` must restore them bit for bit: the engine only keeps the packed tensors that a plan needs.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool] = False  # skips the pruned weights of 2:4 layers
    library: ClassVar[bool] = False  # PyTorch or a vendor library, not a kernel of ours
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
        """Inputs in the layout that the kernels read. Linear layers take rows, whatever dimensions these come from."""
        if self.reads is Layout.ANY:
            return list(inputs)
        return [x.contiguous() if isinstance(operation, Linear) else self.reads.of(x) for x in inputs]

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        """Whether the variant supports inputs of these shapes. If not, `run` computes the result in another way."""
        return True

    def compilation(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> partial[Any] | None:
        """A call that compiles what the variant needs for these inputs, possibly in another thread; None if nothing."""
        return None

    def inlined(self, variant: str) -> bool:
        """Whether the variant is plain PyTorch, which a compiler may fuse with what surrounds it."""
        return False

    @abstractmethod
    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        """Compute the result for inputs in the layout `reads`. Unsupported devices run a reference implementation."""

    def fake(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation) -> Tensor:
        """An empty tensor with the shape and strides of the result."""
        x = inputs[0]
        shape = operation.out_shape(x.shape)
        if self.writes is Layout.NHWC and len(shape) == 4 and not isinstance(operation, Linear):
            return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        return x.new_empty(shape)
