"""What a kernel family is: everything that the engine has to know of a way to run layers.

Adding a family takes a folder beside this file and one line in `registry.py`. The engine asks each family which
variants can run a piece, times them, and keeps weights in the form that the chosen families need.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from halve.engine.operations import Operation, Tensors


class Layout(enum.Enum):
    """How images lie in memory between layers."""

    ANY = "as PyTorch has it"
    NHWC = "channels last"

    def of(self, x: Tensor) -> Tensor:
        """The tensor in this layout."""
        if self is Layout.NHWC and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x


class Kernel(NamedTuple):
    """One variant of one family."""

    family: str
    variant: str

    def __str__(self) -> str:
        return f"{self.family} {self.variant}"


@dataclass(frozen=True)
class Piece:
    """A piece of a network that kernels can run: one operation of the fused graph, and what is known of its weight."""

    operation: Operation
    dtype: torch.dtype  # that it is computed in
    is_2_4: bool = False  # at most two nonzero weights in each block of four input channels


class KernelFamily(ABC):
    """A set of kernels that share their source and their form of the weights.

    A layer's tensors come in canonical form: `weight` in the dtype that is computed in and in PyTorch's shape, `bias`
    in at least single precision. `unpack(pack(tensors))` must give them back bit for bit: the engine keeps only the
    forms that a plan needs.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool] = False  # multiplies only the kept weights of a 2:4 layer
    library: ClassVar[bool] = False  # PyTorch's own kernels and vendor libraries: what we are measured against
    reads: ClassVar[Layout] = Layout.ANY
    writes: ClassVar[Layout] = Layout.ANY

    @property
    @abstractmethod
    def version(self) -> str:
        """A digest of everything that decides how fast the kernels are: sources and variants."""

    @abstractmethod
    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the family cannot run anything on this device in this dtype; None if it can."""

    @abstractmethod
    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        """The variants that can run the piece on a device where the family is available; none if it cannot."""

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors in the form that the kernels read."""
        return dict(tensors)

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        """The tensors in canonical form again."""
        return dict(packed)

    @abstractmethod
    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        """The result for inputs in the layout `reads`, on any device: without a fitting one, a reference runs."""

    def fake(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation) -> Tensor:
        """An empty tensor with the shape and strides of the result."""
        x = inputs[0]
        shape = operation.out_shape(x.shape)
        if self.writes is Layout.NHWC and len(shape) == 4:
            return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        return x.new_empty(shape)
