"""Operations: what a layer computes. Every kernel must match their reference implementation.

An operation is a frozen dataclass without weights. Saved networks store it as JSON, and it is part of the key in the
timing cache.
"""

import dataclasses
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]
Tensors = Mapping[str, Tensor]  # by name: "weight", "bias", "scale", "shortcut_weight", "next_weight" and "next_bias"


class Activation(NamedTuple):
    """An activation that can be fused into layers, and its ATen operation in captured graphs."""

    function: Callable[[Tensor], Tensor]
    aten: Any


ACTIVATIONS = {
    "none": Activation(lambda x: x, None),
    "relu": Activation(F.relu, torch.ops.aten.relu.default),
    "gelu": Activation(F.gelu, torch.ops.aten.gelu.default),
    "silu": Activation(F.silu, torch.ops.aten.silu.default),
    "hardswish": Activation(F.hardswish, torch.ops.aten.hardswish.default),
}


class Operation(ABC):
    """What a layer computes from its inputs and tensors."""

    channel_dim: ClassVar[int] = 1  # of inputs and results

    @abstractmethod
    def reference(self, inputs: Sequence[Tensor], tensors: Tensors) -> Tensor:
        """Compute the result in plain PyTorch."""

    @abstractmethod
    def out_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of the result for a first input of this shape."""

    def results(self, result: Tensor, shape: Sequence[Any]) -> tuple[Tensor, ...]:
        """The parts of the result that are computed one from the other, for a first input of this shape."""
        return (result,)

    @abstractmethod
    def size(self, x: Tensor) -> int:
        """The size of an input in pixels or rows, which plans depend on."""

    @abstractmethod
    def describe(self, x: Tensor) -> str:
        """A short description of the operation on this input, such as `64>64 3x3 at 1 x 56 x 56`."""

    def to_json(self) -> str:
        return json.dumps({"operation": type(self).__name__, **dataclasses.asdict(self)})  # type: ignore[call-overload]

    @staticmethod
    @functools.lru_cache(4096)
    def from_json(text: str) -> "Operation":
        """The operation from `to_json`."""
        fields = json.loads(text)
        kind = OPERATIONS[fields.pop("operation")]
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


@dataclass(frozen=True)
class Convolution(Operation):
    """activation(scale * (conv2d(x, weight) + bias) + residual); the residual is an optional second input.

    >>> conv = Convolution(rows=64, channels=32, kernel=(3, 3), stride=(2, 2), padding=(1, 1), activation="relu")
    >>> conv.out_shape((8, 32, 56, 56))
    (8, 64, 28, 28)
    >>> Operation.from_json(conv.to_json()) == conv
    True
    """

    rows: int  # output channels
    channels: int  # input channels of one group
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: str = "none"
    scaled: bool = False  # has a scale for each output channel

    def reference(self, inputs: Sequence[Tensor], tensors: Tensors) -> Tensor:
        weight, bias = tensors["weight"], _cast(tensors.get("bias"), tensors["weight"])
        y = F.conv2d(inputs[0], weight, bias, self.stride, self.padding, self.dilation, self.groups)
        if self.scaled:
            y = y * tensors["scale"].to(y.dtype).reshape(-1, 1, 1)
        return finish(y, inputs[1:], self.activation)

    def out_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        return (shape[0], self.rows, *self.out_size(shape[2], shape[3]))

    def out_size(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Height and width of the result."""
        sizes = [
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        return sizes[0], sizes[1]

    def size(self, x: Tensor) -> int:
        return x.numel() // max(x.shape[1], 1)

    def describe(self, x: Tensor) -> str:
        stride = f"/{self.stride[0]}" if self.stride != (1, 1) else ""
        kernel = f"{self.kernel[0]}x{self.kernel[1]}"
        return f"{self.channels}>{self.rows} {kernel}{stride} at {x.shape[0]} x {x.shape[2]} x {x.shape[3]}"

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.rows, self.channels, *self.kernel

    @property
    def pointwise(self) -> bool:
        """Whether the convolution is a matrix product: 1x1, stride 1, no padding, no groups."""
        return self.kernel == self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1

    @property
    def convolution(self) -> "Convolution":
        """The operation itself; see `Linear.convolution`."""
        return self


@dataclass(frozen=True)
class Linear(Operation):
    """activation(scale * (x weight^T + bias) + residual); the residual is an optional second input.

    >>> Linear(rows=3, channels=2).reference([torch.ones(1, 2)], {"weight": torch.ones(3, 2)}).tolist()
    [[2.0, 2.0, 2.0]]
    """

    channel_dim: ClassVar[int] = -1

    rows: int
    channels: int
    activation: str = "none"
    scaled: bool = False

    def reference(self, inputs: Sequence[Tensor], tensors: Tensors) -> Tensor:
        y = F.linear(inputs[0], tensors["weight"], _cast(tensors.get("bias"), tensors["weight"]))
        if self.scaled:
            y = y * tensors["scale"].to(y.dtype)
        return finish(y, inputs[1:], self.activation)

    def out_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        return (*shape[:-1], self.rows)

    def size(self, x: Tensor) -> int:
        return x.numel() // max(x.shape[-1], 1)

    def describe(self, x: Tensor) -> str:
        return f"{self.channels}>{self.rows} 1x1 at {' x '.join(map(str, x.shape[:-1]))}"

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.rows, self.channels

    @property
    def pointwise(self) -> bool:
        return True

    @property
    def convolution(self) -> Convolution:
        """The equivalent 1x1 convolution: each row of the input is a pixel."""
        return Convolution(self.rows, self.channels, activation=self.activation, scaled=self.scaled)


@dataclass(frozen=True)
class MaxPool(Operation):
    """2D max pooling.

    >>> MaxPool((2, 2), (2, 2), (0, 0), (1, 1), False).reference([torch.arange(4.0).reshape(1, 1, 2, 2)], {}).item()
    3.0
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool

    def reference(self, inputs: Sequence[Tensor], tensors: Tensors) -> Tensor:
        return torch.max_pool2d(inputs[0], self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode)

    def out_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        pooled = self.reference([torch.empty(tuple(shape), device="meta")], {})
        return tuple(pooled.shape)

    def size(self, x: Tensor) -> int:
        return x.numel() // max(x.shape[1], 1)

    def describe(self, x: Tensor) -> str:
        return f"max pool {self.kernel[0]}x{self.kernel[1]}/{self.stride[0]} at {' x '.join(map(str, x.shape))}"


@dataclass(frozen=True)
class PooledConvolution(Operation):
    """max_pool2d(activation(conv2d(x, weight) + bias)): the first layer of many networks.

    >>> stem = PooledConvolution(64, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
    >>> stem.out_shape((8, 3, 224, 224)), Operation.from_json(stem.to_json()) == stem
    ((8, 64, 56, 56), True)
    """

    rows: int
    channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    activation: str
    pool_kernel: Pair
    pool_stride: Pair
    pool_padding: Pair

    @property
    def convolution(self) -> Convolution:
        return Convolution(self.rows, self.channels, self.kernel, self.stride, self.padding, activation=self.activation)

    @property
    def pool(self) -> MaxPool:
        return MaxPool(self.pool_kernel, self.pool_stride, self.pool_padding, (1, 1), False)

    def reference(self, inputs: Sequence[Tensor], tensors: Tensors) -> Tensor:
        return self.pool.reference([self.convolution.reference(inputs, tensors)], {})

    def out_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        return self.pool.out_shape(self.convolution.out_shape(shape))

    def size(self, x: Tensor) -> int:
        return self.convolution.size(x)

    def describe(self, x: Tensor) -> str:
        return f"{self.convolution.describe(x)}, max pool {self.pool_kernel[0]}x{self.pool_kernel[1]}"

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.convolution.weight_shape


@dataclass(frozen=True)
class JoinedConvolution(Operation):
    """activation(conv2d(x, weight) + conv2d(shortcut, shortcut_weight) + bias): the end of many residual blocks.

    The shortcut is the second input; its convolution is 1x1.

    >>> end = JoinedConvolution(512, 128, (1, 1), (0, 0), (1, 1), "relu", shortcut_channels=256, shortcut_stride=(2, 2))
    >>> end.out_shape((8, 128, 28, 28)), end.shortcut.out_shape((8, 256, 56, 56))
    ((8, 512, 28, 28), (8, 512, 28, 28))
    """

    rows: int
    channels: int
    kernel: Pair
    padding: Pair
    dilation: Pair
    activation: str
    shortcut_channels: int
    shortcut_stride: Pair

    @property
    def convolution(self) -> Convolution:
        """The convolution of the first input."""
        return Convolution(
            self.rows, self.channels, self.kernel, (1, 1), self.padding, self.dilation, 1, self.activation
        )

    @property
    def shortcut(self) -> Convolution:
        """The convolution of the second input."""
        return Convolution(self.rows, self.shortcut_channels, stride=self.shortcut_stride)

    def reference(self, inputs: Sequence[Tensor], tensors: Tensors) -> Tensor:
        x, shortcut = inputs
        added = self.shortcut.reference([shortcut], {"weight": tensors["shortcut_weight"]})
        return self.convolution.reference([x, added], tensors)

    def out_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        return self.convolution.out_shape(shape)

    def size(self, x: Tensor) -> int:
        return self.convolution.size(x)

    def describe(self, x: Tensor) -> str:
        return f"{self.convolution.describe(x)} + {self.shortcut_channels}>{self.rows} 1x1/{self.shortcut_stride[0]}"

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.convolution.weight_shape


@dataclass(frozen=True)
class ChainedConvolution(Operation):
    """The end of a residual block and the 1x1 convolution that reads it; the result has both results.

    y = activation(conv2d(x, weight) + bias + second), where the second input may go through a 1x1 convolution first
    (`shortcut_weight`); z = next_activation(conv2d(y, next_weight) + next_bias). The result is one-dimensional: y and
    then z, each channels last; `split` finds them.

    >>> chain = ChainedConvolution(rows=8, channels=4, activation="relu", next_rows=2, next_activation="none")
    >>> weights = {"weight": torch.ones(8, 4, 1, 1), "next_weight": torch.ones(2, 8, 1, 1)}
    >>> both = chain.reference([torch.ones(1, 4, 3, 3), torch.ones(1, 8, 3, 3)], weights)
    >>> y, z = chain.split(both, (1, 4, 3, 3))
    >>> both.shape, y.shape, z.shape, float(y.max()), float(z.max())
    (torch.Size([90]), torch.Size([1, 8, 3, 3]), torch.Size([1, 2, 3, 3]), 5.0, 40.0)
    """

    rows: int
    channels: int
    activation: str
    next_rows: int
    next_activation: str
    shortcut_channels: int = 0  # 0: the second input is added as it is

    @property
    def convolution(self) -> Convolution:
        """The first convolution."""
        return Convolution(self.rows, self.channels, activation=self.activation)

    @property
    def following(self) -> Convolution:
        """The convolution that reads its result."""
        return Convolution(self.next_rows, self.rows, activation=self.next_activation)

    @property
    def shortcut(self) -> Convolution | None:
        """The convolution of the second input, if it has one."""
        return Convolution(self.rows, self.shortcut_channels) if self.shortcut_channels else None

    def reference(self, inputs: Sequence[Tensor], tensors: Tensors) -> Tensor:
        x, second = inputs
        if self.shortcut is not None:
            second = self.shortcut.reference([second], {"weight": tensors["shortcut_weight"]})
        y = self.convolution.reference([x, second], tensors)
        following = {name.removeprefix("next_"): t for name, t in tensors.items() if name.startswith("next_")}
        z = self.following.reference([y], following)
        return torch.cat([part.permute(0, 2, 3, 1).reshape(-1) for part in (y, z)])

    def split(self, both: Tensor, shape: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """The two results, for a first input of this shape."""
        return _split(both, shape, self.rows)

    def results(self, result: Tensor, shape: Sequence[Any]) -> tuple[Tensor, ...]:
        return self.split(result, shape)

    def out_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        return (shape[0] * shape[2] * shape[3] * (self.rows + self.next_rows),)

    def size(self, x: Tensor) -> int:
        return self.convolution.size(x)

    def describe(self, x: Tensor) -> str:
        return f"{self.convolution.describe(x)}, then {self.rows}>{self.next_rows} 1x1"

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.convolution.weight_shape


OPERATIONS: dict[str, type[Operation]] = {
    kind.__name__: kind
    for kind in (Convolution, Linear, MaxPool, PooledConvolution, JoinedConvolution, ChainedConvolution)
}


def split_results(both: Tensor, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The two results of a `ChainedConvolution`, for a first input `x`."""
    return _split(both, x.shape, rows)


def _split(both: Tensor, shape: Sequence[Any], rows: int) -> tuple[Tensor, Tensor]:
    size = shape[0] * shape[2] * shape[3]
    parts = both[: size * rows], both[size * rows :]
    y, z = (part.view(shape[0], shape[2], shape[3], -1).permute(0, 3, 1, 2) for part in parts)
    return y, z


def finish(y: Tensor, residual: Sequence[Tensor], activation: str) -> Tensor:
    """activation(y + residual); `residual` is empty or holds one tensor."""
    for added in residual:
        y = y + added
    return ACTIVATIONS[activation].function(y)


def _cast(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(weight.dtype)
