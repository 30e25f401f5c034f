"""Operators of a network and their bounds.

Each operator has an interval of its outputs, given intervals of its inputs, and a backward step. The step takes rows of
coefficients A, and returns coefficients A_i for the inputs and a constant c for each row, such that

    A . output  >=  sum_i A_i . input_i + c

for all inputs within their intervals and, for layers whose weights may change, all changes that are allowed. Rounding
is part of the constant, so that the computed coefficients count as exact. The first dimension of values is that of
images, the first of coefficients that of rows; each row belongs to an image.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halve.certify.memory import windows
from halve.certify.rounding import (
    UNIT,
    Interval,
    Owners,
    around,
    dot,
    exact_convolutions,
    gamma,
    loss,
    per_row,
)
from halve.errors import ModelError

_SMALL = {"cpu": 1 << 18, "cuda": 1 << 22}  # products of the numbers of inputs and outputs
Lines = tuple[Tensor, Tensor, Tensor, Tensor]  # slope and intercept below, slope and intercept above
Step = tuple[list[Tensor], Tensor]


class Change(ABC):
    """How the weight of a layer may change, for all images of a statement."""

    @abstractmethod
    def radius(self, layer: "Layer", inputs: Interval) -> Tensor:
        """How far each output may move, at most, from what the layer computes on the same inputs."""

    @abstractmethod
    def loss(self, layer: "Layer", rows: Tensor, inputs: Interval, owners: Owners | None) -> Tensor:
        """How much rows . output may lose by the change, at most, for each row."""

    def only(self, images: Tensor) -> "Change":
        """The change for some of the images, if it differs between them."""
        return self


class Operator(ABC):
    """A node of a network: what it computes from its inputs."""

    #: Whether tighter intervals of the inputs make its bounds tighter.
    relaxes = False

    @abstractmethod
    def interval(self, inputs: Sequence[Interval]) -> Interval:
        """An interval of the outputs."""

    @abstractmethod
    def backward(
        self, rows: Tensor, inputs: Sequence[Interval], owners: Owners | None = None, slopes: Tensor | None = None
    ) -> Step:
        """Coefficients of the inputs, and a constant for each row."""

    def value(self, inputs: Sequence[Tensor]) -> Tensor:
        """The outputs for single inputs, as float64 arithmetic gives them."""
        return self.interval([Interval(x, x) for x in inputs]).center

    def open(self, inputs: Interval) -> Tensor:
        """Which inputs need tighter intervals, if the operator relaxes."""
        return inputs.low < inputs.high

    def to_(self, device: torch.device) -> None:
        """Move its constants to a device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))


class Linear(Operator):
    """A linear map with a bias: `apply` is the map, `apply_absolute` the one with absolute coefficients.

    Args:
        terms: Number of products in the longest sum of the map or its transpose; 0 if it only moves values.
        bias: What is added, or None.
        bias_size: A bound of the sizes that the bias was computed from, for rounding. Default: its absolute value.
    """

    def __init__(self, terms: int, bias: Tensor | None = None, bias_size: Tensor | None = None) -> None:
        self.terms, self.bias = terms, bias
        self.bias_size = bias.abs() if bias is not None and bias_size is None else bias_size
        self._size: tuple[Interval, Tensor] | None = None

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """The map without bias, on a batch."""

    @abstractmethod
    def apply_absolute(self, x: Tensor) -> Tensor:
        """The map with absolute coefficients, on a batch."""

    @abstractmethod
    def transpose(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The transposed map on rows of coefficients; `shape` is that of the input."""

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        [x] = inputs
        if not self.terms:
            return Interval(self.apply(x.low), self.apply(x.high))
        value = self.apply(x.center)
        spread, size = self.apply_absolute(torch.cat([x.radius, x.magnitude])).chunk(2)
        self._size = x, size
        if self.bias is not None and self.bias_size is not None:
            value, size = value + self.bias, size + self.bias_size
        return around(value, spread * (1 + gamma(self.terms)) + size * gamma(self.terms))

    def value(self, inputs: Sequence[Tensor]) -> Tensor:
        result = self.apply(inputs[0])
        return result if self.bias is None else result + self.bias

    def size(self, x: Interval) -> Tensor:
        """A bound of the sum of absolute products of each output."""
        if self._size is None or self._size[0] is not x:
            self._size = x, self.apply_absolute(x.magnitude)
        return self._size[1]

    def backward(
        self, rows: Tensor, inputs: Sequence[Interval], owners: Owners | None = None, slopes: Tensor | None = None
    ) -> Step:
        [x] = inputs
        result = [self.transpose(rows, x.low.shape[1:])]
        if not self.terms:
            return result, rows.new_zeros(len(rows))
        error = self.size(x) * gamma(self.terms)
        if self.bias is None or self.bias_size is None:
            return result, -loss(rows, error, owners)
        bias, error = torch.zeros_like(error) + self.bias, error + self.bias_size * gamma(self.terms)
        return result, dot(rows, bias, bias, error, owners)


class Function(Linear):
    """A linear map given by a function without negative coefficients: pooling, reshaping, slicing, padding."""

    def __init__(self, function: Callable[[Tensor], Tensor], terms: int) -> None:
        super().__init__(terms)
        self._function = function

    def apply(self, x: Tensor) -> Tensor:
        return self._function(x)

    apply_absolute = apply

    def transpose(self, rows: Tensor, shape: torch.Size) -> Tensor:
        zeros = torch.zeros((len(rows), *shape), dtype=rows.dtype, device=rows.device)
        pull = torch.func.vjp(self._function, zeros)[1]
        return pull(rows)[0]  # type: ignore[no-any-return]


class Scale(Linear):
    """Elementwise multiplication by a constant and addition of another: BatchNorm, layer scale."""

    def __init__(self, factor: Tensor, bias: Tensor | None = None, bias_size: Tensor | None = None) -> None:
        super().__init__(8, bias, bias_size)
        self._factor = factor

    def apply(self, x: Tensor) -> Tensor:
        return x * self._factor

    def apply_absolute(self, x: Tensor) -> Tensor:
        return x * self._factor.abs()

    def transpose(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows * self._factor


class Centre(Linear):
    """x minus its mean over the last dimensions: the first step of LayerNorm."""

    def __init__(self, dims: int, count: int) -> None:
        super().__init__(2 * count)
        self._over = tuple(range(-dims, 0))

    def apply(self, x: Tensor) -> Tensor:
        return x - x.mean(self._over, keepdim=True)

    def apply_absolute(self, x: Tensor) -> Tensor:
        return x + x.mean(self._over, keepdim=True)

    def transpose(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return self.apply(rows)  # the map is symmetric


class Layer(Linear):
    """A layer with a weight, which stays as it is; `Changed` is a layer whose weight may change."""

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None, terms: int) -> None:
        super().__init__(terms, bias)
        self.name, self.weight = name, weight

    @abstractmethod
    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """The map with another weight."""

    @abstractmethod
    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        """The derivative of rows . output by the weight: (images, rows, *weight.shape) of (images, rows, ...)."""

    @abstractmethod
    def positions(self, rows: Tensor) -> int:
        """How often each weight is used."""

    @abstractmethod
    def patches(self, x: Tensor) -> Tensor:
        """What the weights of one row are multiplied by, (images, weights, positions)."""

    def apply(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.weight)

    def apply_absolute(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.weight.abs())


class Changed(Operator):
    """A layer whose weight may change.

    Args:
        layer: The layer.
        change: How its weight may change.
    """

    def __init__(self, layer: Layer, change: Change) -> None:
        self.layer, self.change = layer, change

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        found = self.layer.interval(inputs)
        return around(found.center, found.radius + self.change.radius(self.layer, inputs[0]))

    def backward(
        self, rows: Tensor, inputs: Sequence[Interval], owners: Owners | None = None, slopes: Tensor | None = None
    ) -> Step:
        result, constant = self.layer.backward(rows, inputs, owners)
        constant = constant - self.change.loss(self.layer, rows, inputs[0], owners) * (1 + 4 * UNIT)
        return result, constant - constant.abs() * (2 * UNIT)


class Convolution(Layer):
    """A convolution of any dimension, with groups."""

    def __init__(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        taps = weight[0, 0].numel()
        terms = max(weight.shape[1], weight.shape[0] // groups) * taps
        spatial = weight.dim() - 2
        flat = None if bias is None else bias.reshape(-1, *[1] * spatial)
        super().__init__(name, weight, flat, terms)
        self._stride, self._padding = list(stride) * (spatial // len(stride)), list(padding) * (spatial // len(padding))
        self._matrix: Tensor | None = None
        self._dilation, self._groups, self._spatial = list(dilation) * (spatial // len(dilation)), groups, spatial

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._as_product(x):
            sizes = self._sizes(x.shape[2:])
            found = [
                torch.bmm(
                    weight.flatten(1).expand(len(some), -1, -1),
                    torch.nn.functional.unfold(some, tuple(weight.shape[2:]), *self._where),
                )
                for some in self._some(x, math.prod(sizes))
            ]
            return _joined(found).reshape(len(x), len(weight), *sizes)
        none = [0] * self._spatial
        with exact_convolutions():
            return torch.ops.aten.convolution(  # type: ignore[no-any-return]
                x, weight, None, self._stride, self._padding, self._dilation, False, none, self._groups
            )

    def transpose(self, rows: Tensor, shape: torch.Size) -> Tensor:
        if shape.numel() * rows[0].numel() <= _SMALL[rows.device.type]:
            # a matrix product is faster, although most of it is zeros
            if self._matrix is None or len(self._matrix) != shape.numel():
                units = torch.eye(shape.numel(), dtype=rows.dtype, device=rows.device)
                self._matrix = self.apply(units.reshape(-1, *shape)).flatten(1)
            return (rows.flatten(1) @ self._matrix.T).reshape(len(rows), *shape)
        if self._as_product(rows):
            sizes, taps = tuple(shape[1:]), tuple(self.weight.shape[2:])
            across = self.weight.flatten(1).T
            found = [
                torch.nn.functional.fold(
                    torch.bmm(across.expand(len(some), -1, -1), some.flatten(2)), sizes, taps, *self._where
                )
                for some in self._some(rows, math.prod(rows.shape[2:]))
            ]
            return _joined(found)
        like = rows.new_empty(1).expand(len(rows), *shape)
        return self._backward(rows, like, [True, False, False])[0]

    def _as_product(self, x: Tensor) -> bool:
        """Whether to compute the convolution as one matrix product: without cuDNN, PyTorch does so image by image."""
        return x.device.type == "cuda" and self._spatial == 2 and self._groups == 1

    def _some(self, x: Tensor, positions: int) -> tuple[Tensor, ...]:
        """Images or rows, as many at a time as their windows fit into memory."""
        return torch.split(x, max(1, windows(x.device) // (self.weight[0].numel() * positions)))

    @property
    def _where(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return tuple(self._dilation), tuple(self._padding), tuple(self._stride)

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        """The spatial sizes of the outputs."""
        options = zip(sizes, self.weight.shape[2:], self._stride, self._padding, self._dilation, strict=True)
        return [(size + 2 * pad - step * (taps - 1) - 1) // stride + 1 for size, taps, stride, pad, step in options]

    def _backward(self, rows: Tensor, x: Tensor, wanted: list[bool]) -> list[Tensor]:
        none = [0] * self._spatial
        with exact_convolutions():
            return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
                *(rows, x, self.weight, None, self._stride, self._padding, self._dilation, False, none),
                *(self._groups, wanted),
            )

    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        if self._spatial != 2:  # unfold is for images only
            return torch.stack([torch.stack([self._gradient(row, x[i]) for row in rows[i]]) for i in range(len(x))])
        groups, patches = self._groups, self.patches(x)
        patches = patches.reshape(len(x), groups, -1, patches.shape[2])
        parts = rows.reshape(*rows.shape[:2], groups, rows.shape[2] // groups, -1)
        return torch.einsum("isgop,igkp->isgok", parts, patches).reshape(*rows.shape[:2], *self.weight.shape)

    def patches(self, x: Tensor) -> Tensor:
        if self._spatial != 2:
            raise ModelError(f"certify has no bounds for changed masks of {self.name}: it is no convolution of images")
        return torch.nn.functional.unfold(x, tuple(self.weight.shape[2:]), *self._where)

    def _gradient(self, row: Tensor, x: Tensor) -> Tensor:
        return self._backward(row[None], x[None], [False, True, False])[1]

    def positions(self, rows: Tensor) -> int:
        return math.prod(rows.shape[2:])


class Product(Layer):
    """A matrix product along the last dimension: nn.Linear."""

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(name, weight, bias, max(weight.shape))

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def transpose(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows @ self.weight

    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape
        parts = rows.reshape(*rows.shape[:2], -1, outputs)
        return torch.einsum("ispo,ipk->isok", parts, x.reshape(len(x), -1, inputs))

    def positions(self, rows: Tensor) -> int:
        return math.prod(rows.shape[1:-1])

    def patches(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2)


class Sum(Operator):
    """The sum or difference of two values; shapes may differ by broadcasting."""

    def __init__(self, sign: float = 1.0) -> None:
        self._sign = sign

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        one, other = inputs
        if self._sign < 0:
            other = Interval(-other.high, -other.low)
        low, high = one.low + other.low, one.high + other.high
        return Interval(low - low.abs() * (2 * UNIT), high + high.abs() * (2 * UNIT))

    def backward(
        self, rows: Tensor, inputs: Sequence[Interval], owners: Owners | None = None, slopes: Tensor | None = None
    ) -> Step:
        both = (rows, rows if self._sign == 1 else self._sign * rows)
        parts = [_reduced(part, x.low.shape[1:]) for part, x in zip(both, inputs, strict=True)]
        if rows.shape[1:] == inputs[0].low.shape[1:] == inputs[1].low.shape[1:]:
            return parts, rows.new_zeros(len(rows))
        error = (inputs[0].magnitude + inputs[1].magnitude) * gamma(rows[0].numel())
        return parts, -loss(rows, error, owners)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reduced(rows: Tensor, shape: torch.Size) -> Tensor:
    """The transpose of broadcasting to the shape of the rows."""
    extra = rows.dim() - 1 - len(shape)
    rows = rows.sum(tuple(range(1, 1 + extra))) if extra else rows
    wide = [d + 1 for d, size in enumerate(shape) if size == 1 and rows.shape[d + 1] != 1]
    return rows.sum(wide, keepdim=True) if wide else rows


class Concatenation(Operator):
    """Values joined along a dimension, counted from the first after the batch."""

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        dim = self._dim + 1 if self._dim >= 0 else self._dim
        return Interval(*(torch.cat(ends, dim) for ends in zip(*inputs, strict=True)))

    def backward(
        self, rows: Tensor, inputs: Sequence[Interval], owners: Owners | None = None, slopes: Tensor | None = None
    ) -> Step:
        dim = self._dim + 1 if self._dim >= 0 else self._dim
        sizes = [x.low.shape[dim] for x in inputs]
        return list(rows.split(sizes, dim)), rows.new_zeros(len(rows))


class Elementwise(Operator):
    """A function of each value, between two lines."""

    relaxes = True

    _lines: tuple[Interval, Lines] | None = None

    @abstractmethod
    def lines(self, x: Interval) -> Lines:
        """Lines below and above the function on an interval, valid as they are rounded."""

    def below(self, x: Interval, slopes: Tensor, owners: Owners | None) -> Tensor:
        """Slopes of lines below the function, with the same intercept, that are as close to given ones as is valid."""
        raise NotImplementedError

    def _lines_of(self, x: Interval) -> Lines:
        """The lines, remembered for the last interval."""
        if self._lines is None or self._lines[0] is not x:
            self._lines = x, self.lines(x)
        return self._lines[1]

    def backward(
        self, rows: Tensor, inputs: Sequence[Interval], owners: Owners | None = None, slopes: Tensor | None = None
    ) -> Step:
        [x] = inputs
        below, low, above, high = self._lines_of(x)
        error = x.magnitude * torch.maximum(below.abs(), above.abs()).clamp(min=1) * (4 * UNIT)
        below = per_row(below, owners) if slopes is None else self.below(x, slopes, owners)
        result = rows * torch.where(rows > 0, below, per_row(above, owners))
        return [result], dot(rows, low, high, error, owners)


class ReLU(Elementwise):
    """max(x, 0). The slope below may be any number from 0 to 1; it can be optimised."""

    def open(self, inputs: Interval) -> Tensor:
        return (inputs.low < 0) & (inputs.high > 0)

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        return Interval(inputs[0].low.clamp(min=0), inputs[0].high.clamp(min=0))

    def lines(self, x: Interval) -> Lines:
        low, high = x
        active, open_ = (low >= 0).to(low), self.open(x)
        above = torch.where(open_, high / (high - low).clamp(min=1e-300), active).clamp(max=1)
        needed = torch.maximum(-low * above, high * (1 - above)) * (1 + 8 * UNIT)  # for the slope as it is rounded
        intercept = torch.where(open_, needed, torch.zeros_like(low))
        below = torch.where(open_, (high > -low).to(low), active)
        return below, torch.zeros_like(low), above, intercept

    def below(self, x: Interval, slopes: Tensor, owners: Owners | None) -> Tensor:
        active = per_row((x.low >= 0).to(x.low), owners)
        valid = torch.where((slopes >= 0) & (slopes <= 1), slopes, slopes.detach().clamp(0, 1))
        return torch.where(per_row(self.open(x), owners), valid, active)


@dataclass(frozen=True)
class Curve:
    """A smooth function: its values, how far they may be off, and a bound of its second derivative."""

    function: Callable[[Tensor], Tensor]
    curvature: float
    error: float = 64 * UNIT  # of a value, relative to 1 + |x|


CURVES = {
    "gelu": Curve(torch.nn.functional.gelu, 0.8),  # |f''| <= 2 phi(0) = 0.798
    "gelu, tanh": Curve(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 0.9),
    "silu": Curve(torch.nn.functional.silu, 0.5),
    "sigmoid": Curve(torch.sigmoid, 0.1),  # 1 / (6 sqrt 3) = 0.0962
    "tanh": Curve(torch.tanh, 0.78),  # 4 / (3 sqrt 3) = 0.7698
}
_POINTS = 33


class Smooth(Elementwise):
    """A smooth function, between the lines of its chord's slope that touch it.

    The distance from a line is largest or smallest at one of 33 points, but for at most curvature * step^2 / 8.
    """

    def __init__(self, curve: Curve) -> None:
        self._curve = curve

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        [x] = inputs
        return self._range(x, torch.zeros_like(x.low))

    def lines(self, x: Interval) -> Lines:
        rise = self._curve.function(x.high) - self._curve.function(x.low)
        width = x.high - x.low
        middle = x.center.clone().requires_grad_(True)
        with torch.enable_grad():
            tangent = torch.autograd.grad(self._curve.function(middle).sum(), middle)[0]
        slope = torch.where(width > 1e-6, rise / width.clamp(min=1e-300), tangent).detach()
        low, high = self._range(x, slope)
        return slope, low, slope, high

    def _range(self, x: Interval, slope: Tensor) -> Interval:
        """The range of f(x) - slope * x."""
        low = torch.full_like(x.low, math.inf)
        high, width = -low, x.high - x.low
        for step in range(_POINTS):
            point = torch.minimum(x.low + width * (step / (_POINTS - 1)), x.high)
            value = self._curve.function(point) - slope * point
            low, high = torch.minimum(low, value), torch.maximum(high, value)
        between = self._curve.curvature / 8 * (width / (_POINTS - 1) * (1 + 1e-9) + 4 * UNIT * x.magnitude).square()
        error = between * (1 + 1e-9) + self._curve.error * (1 + x.magnitude) * (1 + slope.abs())
        return Interval(low - error, high + error)


class Normalise(Elementwise):
    """u / sqrt(mean(u^2) + eps) over the last dimensions, for u that is centred: the second step of LayerNorm.

    The root lies in an interval, so that the output lies between u times one end and u times the other.
    """

    def __init__(self, dims: int, eps: float, count: int) -> None:
        self._over, self._eps, self._count = tuple(range(-dims, 0)), eps, count

    def _factors(self, x: Interval) -> Interval:
        """An interval of 1 / sqrt(mean(u^2) + eps)."""
        most = x.magnitude
        least = torch.where(
            (x.low < 0) & (x.high > 0), torch.zeros_like(most), torch.minimum(x.low.abs(), x.high.abs())
        )
        slack = gamma(2 * self._count)
        smallest = least.square().mean(self._over, keepdim=True) * (1 - slack) + self._eps
        largest = most.square().mean(self._over, keepdim=True) * (1 + slack) + self._eps
        return Interval(largest.rsqrt() * (1 - 64 * UNIT), smallest.rsqrt() * (1 + 64 * UNIT))

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        [x] = inputs
        small, large = self._factors(x)
        low = torch.minimum(x.low * small, x.low * large)
        high = torch.maximum(x.high * small, x.high * large)
        return Interval(low - low.abs() * (2 * UNIT), high + high.abs() * (2 * UNIT))

    def lines(self, x: Interval) -> Lines:
        small, large = (factor.expand_as(x.low) for factor in self._factors(x))
        low, high = x
        crosses, width = (low < 0) & (high > 0), (high - low).clamp(min=1e-300)
        # below: the smaller of u * small and u * large is concave, so that its chord is below it; above: the same
        below = torch.where(low >= 0, small, large)
        above = torch.where(low >= 0, large, small)
        below = torch.where(crosses, (high * small - low * large) / width, below)
        above = torch.where(crosses, (high * large - low * small) / width, above)
        ends = (low, high)
        under = torch.minimum(*(torch.minimum(end * small, end * large) - below * end for end in ends))
        over = torch.maximum(*(torch.maximum(end * small, end * large) - above * end for end in ends))
        slack = x.magnitude * large * (16 * UNIT)
        return below, under - slack, above, over + slack


@dataclass
class MaxPool(Operator):
    """The largest value of each window: at least any of them, and equal to one that is larger than all others."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool

    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        options = (self.kernel, self.stride, self.padding, self.dilation, self.ceil)
        return torch.nn.functional.max_pool2d(x, *options, return_indices=True)

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        return Interval(*(self._pool(end)[0] for end in inputs[0]))

    def backward(
        self, rows: Tensor, inputs: Sequence[Interval], owners: Owners | None = None, slopes: Tensor | None = None
    ) -> Step:
        [x] = inputs
        _, best = self._pool(x.center)  # (images, channels, height, width): the place in its channel to follow
        channels = x.low.shape[1]
        flat = best.flatten(2)
        others = self._without(x.high, best)
        alone = (x.low.flatten(2).gather(2, flat).reshape(best.shape) >= others).to(rows)
        top = self._pool(x.high)[0]
        plus = rows.clamp(min=0)
        kept = plus + (rows - plus) * per_row(alone, owners)
        result = rows.new_zeros(len(rows), channels, x.low[0, 0].numel())
        result = result.scatter_add(2, per_row(flat, owners).expand(len(rows), -1, -1), kept.flatten(2))
        error = torch.zeros_like(top) + x.magnitude.max() * gamma(math.prod(self.kernel))  # windows may share a place
        constant = dot(rows, torch.zeros_like(top), top * (1 - alone), error, owners)
        return [result.reshape(len(rows), *x.low.shape[1:])], constant

    def _without(self, high: Tensor, best: Tensor) -> Tensor:
        """The largest of all other values in each window."""
        sides: list[int] = []
        for pad, size, step in zip(self.padding, self.kernel, self.dilation, strict=True):
            sides = [pad, pad + size * step, *sides]  # also beyond the border, where windows may end with ceil_mode
        places = torch.arange(high[0, 0].numel(), device=high.device).reshape(1, 1, *high.shape[2:])
        padded = torch.nn.functional.pad(high, sides, value=-math.inf)
        places = torch.nn.functional.pad(places, sides, value=-1)
        result = torch.full(best.shape, -math.inf, dtype=high.dtype, device=high.device)
        for offsets in itertools.product(*map(range, self.kernel)):
            across = zip(offsets, self.dilation, best.shape[2:], self.stride, strict=True)
            ends = [(at * step, at * step + (size - 1) * stride + 1, stride) for at, step, size, stride in across]
            window: tuple[Any, ...] = (..., *(slice(*one) for one in ends))
            result = torch.where(places[window] != best, torch.maximum(result, padded[window]), result)
        return result
