"""Layers with a choice of kernels, which may depend on the input size."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halve.engine.kernels import op
from halve.engine.kernels.kernel import Emitted, Kernel, Piece
from halve.engine.kernels.registry import FALLBACK, FAMILIES, family_of, kernels_for
from halve.engine.operations import MaxPool, Operation


class Layer(nn.Module):
    """One operation of a compiled network, with its tensors packed for the kernels it uses.

    >>> from halve.engine.operations import Linear
    >>> tensors = {"weight": torch.tensor([[1.0, 0.0, 0.0, 2.0]]), "bias": torch.ones(1)}
    >>> layer = Layer("fc", Linear(1, 4, activation="relu"), tensors)
    >>> layer.is_2_4, layer(torch.ones(2, 4)).tolist()
    (True, [[4.0], [4.0]])
    >>> layer.use({2: Kernel("mma_sp", "64x64")})
    >>> layer.held, layer(torch.ones(2, 4)).tolist()
    (['mma_sp'], [[4.0], [4.0]])
    """

    def __init__(
        self, name: str, operation: Operation, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.name, self.operation, self._described = name, operation, operation.to_json()
        weight = tensors.get("weight")
        self.dtype = weight.dtype if weight is not None else dtype or torch.float32
        weights = [tensor for key, tensor in tensors.items() if key.endswith("weight")]
        self.is_2_4 = bool(weights) and getattr(operation, "groups", 1) == 1 and all(map(_is_2_4, weights))
        self.kernels: dict[int, Kernel] = {}  # input size -> kernel
        self._packed_names: dict[str, dict[str, str]] = {}  # family -> tensor -> its buffer
        self._pack(FALLBACK.family, dict(tensors))

    @property
    def piece(self) -> Piece:
        return Piece(self.operation, self.dtype, self.is_2_4)

    @property
    def has_weight(self) -> bool:
        return not isinstance(self.operation, MaxPool)

    @property
    def held(self) -> list[str]:
        """The kernel families whose packed tensors are in memory."""
        return list(self._packed_names)

    def packed(self, family: str) -> dict[str, Tensor]:
        """The packed tensors of a family in `held`."""
        buffers = self._buffers
        return {name: buffers[key] for name, key in self._packed_names[family].items()}  # type: ignore[misc]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors in canonical form."""
        family = next(iter(self._packed_names))
        return FAMILIES[family].unpack(self.operation, self.packed(family))

    def cast_(self, dtype: torch.dtype) -> None:
        """Convert to another dtype and reset to the fallback kernel. Biases stay in single precision."""
        tensors = {
            name: tensor.to(dtype) if name.endswith("weight") else tensor for name, tensor in self.tensors().items()
        }
        self._packed_names.clear()
        self._buffers.clear()
        self.dtype, self.kernels = dtype, {}
        self._pack(FALLBACK.family, tensors)

    def kernel_for(self, size: int) -> Kernel:
        """The kernel for an input size: that of the nearest planned size."""
        if not self.kernels:
            return FALLBACK
        if size in self.kernels:
            return self.kernels[size]
        return self.kernels[min(self.kernels, key=lambda known: abs(math.log(known / max(size, 1))))]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        inputs = [x] if residual is None else [x, residual]
        if self.has_weight:  # models may compute some values in another dtype, such as a softmax
            inputs = [value.to(self.dtype) for value in inputs]
        if torch.compiler.is_compiling():  # sizes are symbolic
            kernel = next(iter(self.kernels.values()), FALLBACK)
            return op.call(inputs, self.packed(kernel.family), self._described, kernel)
        return self.run(inputs, self.kernel_for(self.operation.size(x)))

    def run(self, inputs: list[Tensor], kernel: Kernel) -> Tensor:
        """Run one kernel, whose family must be in `held`."""
        family = family_of(kernel)
        given = family.laid_out(inputs, self.operation)
        return family.run(given, self.packed(kernel.family), self.operation, kernel.variant)

    def available_kernels(self, device: torch.device) -> list[Kernel]:
        """The kernels that can run this layer on a device."""
        return kernels_for(self.piece, device)

    def sparse_kernels(self, device: torch.device) -> list[Kernel]:
        """The sparse kernels that can run this layer on a device."""
        return [kernel for kernel in self.available_kernels(device) if family_of(kernel).sparse]

    def emitted(self) -> list[Emitted]:
        """The machine code of the kernels that the layer uses, for those that emit it."""
        codes = (
            family_of(kernel).emitted(self.packed(kernel.family), self.operation, kernel.variant)
            for kernel in dict.fromkeys(self.kernels.values())
        )
        return [code for code in codes if code is not None]

    def hold(self, kernels: Iterable[Kernel]) -> None:
        """Keep exactly the packed tensors that these kernels need."""
        tensors = self.tensors()
        wanted = {kernel.family for kernel in kernels} or {FALLBACK.family}
        for family in wanted - self._packed_names.keys():
            self._pack(family, tensors)
        for family in [*self._packed_names]:
            if family not in wanted:
                for key in self._packed_names.pop(family).values():
                    delattr(self, key)

    def use(self, kernels: Mapping[int, Kernel]) -> None:
        """Set the kernel for each input size."""
        self.hold(kernels.values())
        self.kernels = dict(kernels)

    def _pack(self, family: str, tensors: Mapping[str, Tensor]) -> None:
        packed = FAMILIES[family].pack(self.operation, tensors)
        self._packed_names[family] = {name: f"{family}_{name}" for name in packed}
        for name, tensor in packed.items():
            self.register_buffer(self._packed_names[family][name], tensor)

    def _apply(self, *args: Any, **kwargs: Any) -> "Layer":
        before = {name: buffer.stride() for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for name, strides in before.items():  # kernels rely on the strides: ignore a requested memory format
            buffer = self.get_buffer(name)
            if buffer.stride() != strides:
                ordered = torch.empty_strided(buffer.shape, strides, dtype=buffer.dtype, device=buffer.device)
                self._buffers[name] = ordered.copy_(buffer)
        return self

    def extra_repr(self) -> str:
        return f"{self.name}: {', '.join(sorted({str(kernel) for kernel in self.kernels.values()})) or FALLBACK}"


def _is_2_4(weight: Tensor) -> bool:
    """Whether every block of four input channels has at most two nonzero weights."""
    channels = weight.shape[1]
    kept = (weight != 0).reshape(len(weight), channels, -1).transpose(1, 2)
    kept = torch.nn.functional.pad(kept, (0, -channels % 4))
    return bool(kept.reshape(-1, 4).sum(1).max() <= 2)
