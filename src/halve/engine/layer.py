"""A layer that can run in several ways, and which one it takes for which size of input.

A way is a name: "torch", "cudnn", "gemm" are dense (see `ops.DENSE_WAYS`); "sparse TILE" is our kernel on the packed
2:4 weight, "twin TILE" the same kernel on all weights. Only the forms of the weight that some way needs are kept.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from halve.engine import ops
from halve.engine.geometry import Geometry
from halve.engine.kernels.mma_sp import launch as conv
from halve.engine.kernels.mma_sp import packing as pack

DENSE = "torch"  # runs everywhere
_NHWC = torch.channels_last


class Layer(nn.Module):
    """activation(conv(x) + bias + residual), or the same of a Linear layer.

    >>> weight = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    >>> layer = Layer("fc", Geometry(1, 4, activation="relu"), weight, torch.ones(1), linear=True)
    >>> layer.halved, layer(torch.ones(2, 4)).tolist()
    (True, [[4.0], [4.0]])
    >>> layer.take({2: "sparse 64x64"})
    >>> layer.weight is None, layer(torch.ones(2, 4)).tolist()
    (True, [[4.0], [4.0]])
    """

    weight: Tensor | None
    values: Tensor | None
    metadata: Tensor | None
    twin: Tensor | None
    bias: Tensor | None
    bias32: Tensor | None

    def __init__(self, name: str, geometry: Geometry, weight: Tensor, bias: Tensor | None, *, linear: bool) -> None:
        super().__init__()
        self.name, self.geometry, self.linear = name, geometry, linear
        self.register_buffer("bias", None if bias is None else bias.to(weight.dtype))
        self.register_buffer("bias32", None if bias is None else bias.float())
        for form in ("weight", "values", "metadata", "twin"):
            self.register_buffer(form, None)
        self.weight = weight if linear else weight.contiguous(memory_format=_NHWC)
        self.halved = geometry.groups == 1 and _is_two_of_four(weight)
        self.ways: dict[int, str] = {}

    def way_for(self, pixels: int) -> str:
        """The way for an input of so many pixels (or rows): that of the nearest size which was planned."""
        if not self.ways:
            return DENSE
        return self.ways[min(self.ways, key=lambda known: abs(math.log(known / max(pixels, 1))))]

    @property
    def dtype(self) -> torch.dtype:
        """That the layer computes in."""
        form = self.weight
        if form is None:
            form = self.twin if self.values is None else self.values
        assert form is not None
        return form.dtype

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        dtype = self.dtype
        if x.dtype != dtype:  # after what a model computes in another type on purpose, a softmax say
            x = x.to(dtype)
        if residual is not None and residual.dtype != dtype:
            residual = residual.to(dtype)
        if torch.compiler.is_compiling():  # sizes are unknown then
            return self.run(x, residual, next(iter(self.ways.values()), DENSE))
        return self.run(x, residual, self.way_for(pixels_of(x, self.linear)))

    def run(self, x: Tensor, residual: Tensor | None, way: str) -> Tensor:
        """In one way, whose form of the weight must be there."""
        kind, _, tile = way.partition(" ")
        end, sizes = self.geometry.activation, self._sizes
        result: Tensor
        if kind in ("sparse", "twin"):
            form = (self.values, self.metadata) if kind == "sparse" else (self.twin, None)
            if self.linear:
                result = ops.packed_linear(x, *form, self.bias32, residual, self.geometry.rows, end, tile)
            else:
                shape = list(self.geometry.weight_shape)
                result = ops.packed_conv2d(x, *form, self.bias32, residual, shape, *sizes, end, tile)
        elif self.linear:
            result = ops.linear(x, self.weight, self.bias, residual, end, kind)
        else:
            result = ops.conv2d(x, self.weight, self.bias, residual, *sizes, self.geometry.groups, end, kind)
        return result

    def possible(self, twins: bool = True) -> list[str]:
        """The ways that the layer's weight and type allow on a GPU that can run our kernels."""
        geometry = self.geometry
        ways = [DENSE]
        if not self.linear and geometry.activation == "relu":
            ways.append("cudnn")
        if geometry.pointwise:
            ways.append("gemm")
        if geometry.groups == 1 and geometry.channels % 4 == 0 and self.dtype in conv.DTYPES:
            ways += [f"sparse {tile}" for tile in conv.TILES] if self.halved else []
            ways += [f"twin {tile}" for tile in conv.TILES] if twins else []
        return ways

    def dense(self) -> Tensor:
        """The weight with its zeros."""
        if self.weight is not None:
            return self.weight
        shape = self.geometry.weight_shape
        values, metadata = (self.twin, None) if self.values is None else (self.values, self.metadata)
        assert values is not None
        found = pack.restored(values, metadata, shape)
        return found.flatten(1) if self.linear else found.contiguous(memory_format=_NHWC)

    def hold(self, ways: list[str]) -> None:
        """Keep the forms of the weight that these ways need, and no others."""
        weight = self.dense()
        kinds = {way.partition(" ")[0] for way in ways}
        matrix = weight.reshape(self.geometry.weight_shape)
        sparse = "sparse" in kinds
        packed = pack.pack(matrix, matrix != 0) if sparse and self.values is None else None
        if packed is not None:
            self.values, self.metadata = packed.values, packed.metadata
        if not sparse:
            self.values = self.metadata = None
        if "twin" not in kinds:
            self.twin = None
        elif self.twin is None:
            self.twin = pack.pack_dense(matrix)
        self.weight = weight if kinds & set(ops.DENSE_WAYS) or not kinds else None

    def take(self, ways: dict[int, str]) -> None:
        """Run in these ways from now on: input size in pixels -> way."""
        self.hold(list(ways.values()))
        self.ways = dict(ways)

    def _apply(self, *args: Any, **kwargs: Any) -> "Layer":
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.bias32 is not None:  # the kernels add it in single precision, whatever the layer is converted to
            self.bias32 = self.bias32.float()
        for name in ("values", "metadata", "twin"):  # which kernels read in order, whatever memory format is asked for
            form = getattr(self, name)
            setattr(self, name, None if form is None else form.contiguous())
        return self

    @property
    def _sizes(self) -> tuple[list[int], list[int], list[int]]:
        return list(self.geometry.stride), list(self.geometry.padding), list(self.geometry.dilation)

    def extra_repr(self) -> str:
        return f"{self.name}: {', '.join(sorted(set(self.ways.values()))) or DENSE}"


def pixels_of(x: Tensor, linear: bool) -> Any:
    """How many pixels (or rows) an input has."""
    return x.numel() // max(x.shape[-1 if linear else 1], 1)


def _is_two_of_four(weight: Tensor) -> bool:
    """Whether no block of four input channels holds more than two weights."""
    channels = weight.shape[1]
    kept = (weight != 0).reshape(len(weight), channels, -1).transpose(1, 2)
    kept = torch.nn.functional.pad(kept, (0, -channels % 4))
    return bool(kept.reshape(-1, 4).sum(1).max() <= 2)
