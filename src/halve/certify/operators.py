"""Operators of a network and their bounds.

Each operator has an interval of its outputs, given intervals of its inputs, and a backward step. The step takes rows of
coefficients A, and returns coefficients A_i for the inputs and a constant c for each row, such that

    A . output  >=  sum_i A_i . input_i + c

for all inputs within their intervals and, for layers whose weights may change, all changes that are allowed. Rounding
is part of the constant, so that the computed coefficients count as exact. Tensors have no batch dimension; rows come
first.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halve.certify.rounding import UNIT, Interval, around, dot, gamma
from halve.errors import ModelError

_SMALL = 1 << 18  # products of the numbers of inputs and outputs
Lines = tuple[Tensor, Tensor, Tensor, Tensor]  # slope and intercept below, slope and intercept above
Step = tuple[list[Tensor], Tensor]


class Change(ABC):
    """How the weight of a layer may change, for all images of a statement."""

    @abstractmethod
    def radius(self, layer: "Layer", inputs: Interval) -> Tensor:
        """How far each output may move, at most, from what the layer computes on the same inputs."""

    @abstractmethod
    def loss(self, layer: "Layer", rows: Tensor, inputs: Interval) -> Tensor:
        """How much rows . output may lose by the change, at most, for each row."""


class Operator(ABC):
    """A node of a network: what it computes from its inputs."""

    #: Whether tighter intervals of the inputs make its bounds tighter.
    relaxes = False

    @abstractmethod
    def interval(self, inputs: Sequence[Interval]) -> Interval:
        """An interval of the outputs."""

    @abstractmethod
    def backward(self, rows: Tensor, inputs: Sequence[Interval], slopes: Tensor | None = None) -> Step:
        """Coefficients of the inputs, and a constant for each row."""

    def value(self, inputs: Sequence[Tensor]) -> Tensor:
        """The outputs for single inputs, as float64 arithmetic gives them."""
        return self.interval([Interval(x, x) for x in inputs]).center

    def open(self, inputs: Interval) -> Tensor:
        """Which inputs need tighter intervals, if the operator relaxes."""
        return inputs.low < inputs.high


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
            ends = self.apply(torch.stack([x.low, x.high]))
            return Interval(ends[0], ends[1])
        value = self.apply(x.center[None])[0]
        both = self.apply_absolute(torch.stack([x.radius, x.magnitude]))
        spread, size = both[0], both[1]
        self._size = x, size
        if self.bias is not None and self.bias_size is not None:
            value, size = value + self.bias, size + self.bias_size
        return around(value, spread * (1 + gamma(self.terms)) + size * gamma(self.terms))

    def value(self, inputs: Sequence[Tensor]) -> Tensor:
        result = self.apply(inputs[0][None])[0]
        return result if self.bias is None else result + self.bias

    def size(self, x: Interval) -> Tensor:
        """A bound of the sum of absolute products of each output."""
        if self._size is None or self._size[0] is not x:
            self._size = x, self.apply_absolute(x.magnitude[None])[0]
        return self._size[1]

    def backward(self, rows: Tensor, inputs: Sequence[Interval], slopes: Tensor | None = None) -> Step:
        [x] = inputs
        result = [self.transpose(rows, x.low.shape)]
        if not self.terms:
            return result, rows.new_zeros(len(rows))
        error = self.size(x) * gamma(self.terms)
        bias = torch.zeros_like(error)
        if self.bias is not None and self.bias_size is not None:
            bias, error = bias + self.bias, error + self.bias_size * gamma(self.terms)
        return result, dot(rows, bias, bias, error)


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
    """A layer with a weight, which may change: `change` says how."""

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None, terms: int) -> None:
        super().__init__(terms, bias)
        self.name, self.weight = name, weight
        self.change: Change | None = None

    @abstractmethod
    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """The map with another weight."""

    @abstractmethod
    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        """The derivative of rows . output by the weight, at one input: (rows, *weight.shape)."""

    @abstractmethod
    def positions(self, rows: Tensor) -> int:
        """How often each weight is used."""

    @abstractmethod
    def patches(self, x: Tensor) -> Tensor:
        """What the weights of one row are multiplied by, (weights, positions)."""

    def apply(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.weight)

    def apply_absolute(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.weight.abs())

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        found = super().interval(inputs)
        if self.change is None:
            return found
        radius = self.change.radius(self, inputs[0])
        center = found.center
        return around(center, found.radius + radius)

    def backward(self, rows: Tensor, inputs: Sequence[Interval], slopes: Tensor | None = None) -> Step:
        result, constant = super().backward(rows, inputs)
        if self.change is not None:
            constant = constant - self.change.loss(self, rows, inputs[0]) * (1 + 4 * UNIT)
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
        none = [0] * self._spatial
        return torch.ops.aten.convolution(  # type: ignore[no-any-return]
            x, weight, None, self._stride, self._padding, self._dilation, False, none, self._groups
        )

    def transpose(self, rows: Tensor, shape: torch.Size) -> Tensor:
        if shape.numel() * rows[0].numel() <= _SMALL:  # a matrix product is faster, although most of it is zeros
            if self._matrix is None or len(self._matrix) != shape.numel():
                units = torch.eye(shape.numel(), dtype=rows.dtype, device=rows.device)
                self._matrix = self.apply(units.reshape(-1, *shape)).flatten(1)
            return (rows.flatten(1) @ self._matrix.T).reshape(len(rows), *shape)
        like = rows.new_empty(1).expand(len(rows), *shape)
        none, mask = [0] * self._spatial, [True, False, False]
        found = torch.ops.aten.convolution_backward(
            *(
                rows,
                like,
                self.weight,
                None,
                self._stride,
                self._padding,
                self._dilation,
                False,
                none,
                self._groups,
                mask,
            )
        )
        return found[0]  # type: ignore[no-any-return]

    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        if self._spatial != 2:  # unfold is for images only
            return torch.stack([self._gradient(row, x) for row in rows])
        groups, patches = self._groups, self.patches(x)
        patches = patches.reshape(groups, -1, patches.shape[1])
        parts = rows.reshape(len(rows), groups, rows.shape[1] // groups, -1)
        return torch.einsum("sgop,gkp->sgok", parts, patches).reshape(len(rows), *self.weight.shape)

    def patches(self, x: Tensor) -> Tensor:
        if self._spatial != 2:
            raise ModelError(f"certify has no bounds for changed masks of {self.name}: it is no convolution of images")
        where = (tuple(self._dilation), tuple(self._padding), tuple(self._stride))
        return torch.nn.functional.unfold(x[None], tuple(self.weight.shape[2:]), *where)[0]

    def _gradient(self, row: Tensor, x: Tensor) -> Tensor:
        none, mask = [0] * self._spatial, [False, True, False]
        found = torch.ops.aten.convolution_backward(
            *(row[None], x[None], self.weight, None, self._stride, self._padding, self._dilation, False, none),
            *(self._groups, mask),
        )
        return found[1]  # type: ignore[no-any-return]

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
        return torch.einsum("spo,pk->sok", rows.reshape(len(rows), -1, outputs), x.reshape(-1, inputs))

    def positions(self, rows: Tensor) -> int:
        return math.prod(rows.shape[1:-1])

    def patches(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]).T


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

    def backward(self, rows: Tensor, inputs: Sequence[Interval], slopes: Tensor | None = None) -> Step:
        one, other = (_reduced(part, x.low.shape) for part, x in zip((rows, self._sign * rows), inputs, strict=True))
        if rows.shape[1:] == inputs[0].low.shape == inputs[1].low.shape:
            return [one, other], rows.new_zeros(len(rows))
        error = (inputs[0].magnitude + inputs[1].magnitude) * gamma(rows[0].numel())
        nothing = torch.zeros_like(error)
        return [one, other], dot(rows, nothing, nothing, error)


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
        return Interval(*(torch.cat(ends, self._dim) for ends in zip(*inputs, strict=True)))

    def backward(self, rows: Tensor, inputs: Sequence[Interval], slopes: Tensor | None = None) -> Step:
        dim = self._dim + 1 if self._dim >= 0 else self._dim
        sizes = [x.low.shape[self._dim] for x in inputs]
        return list(rows.split(sizes, dim)), rows.new_zeros(len(rows))


class Elementwise(Operator):
    """A function of each value, between two lines."""

    relaxes = True

    _lines: tuple[Interval, Lines] | None = None

    @abstractmethod
    def lines(self, x: Interval, slopes: Tensor | None = None) -> Lines:
        """Lines below and above the function on an interval, valid as they are rounded."""

    def _lines_of(self, x: Interval, slopes: Tensor | None) -> Lines:
        """The lines, remembered for the last interval."""
        if slopes is not None:
            return self.lines(x, slopes)
        if self._lines is None or self._lines[0] is not x:
            self._lines = x, self.lines(x)
        return self._lines[1]

    def backward(self, rows: Tensor, inputs: Sequence[Interval], slopes: Tensor | None = None) -> Step:
        [x] = inputs
        below, low, above, high = self._lines_of(x, slopes)
        plus = rows.clamp(min=0)
        result = plus * below + (rows - plus) * above
        error = x.magnitude * torch.maximum(below.abs(), above.abs()) * (4 * UNIT)
        return [result], dot(rows, low, high, error)


class ReLU(Elementwise):
    """max(x, 0). The slope below may be any number from 0 to 1; it can be optimised."""

    def open(self, inputs: Interval) -> Tensor:
        return (inputs.low < 0) & (inputs.high > 0)

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        return Interval(inputs[0].low.clamp(min=0), inputs[0].high.clamp(min=0))

    def lines(self, x: Interval, slopes: Tensor | None = None) -> Lines:
        low, high = x
        active, open_ = (low >= 0).to(low), self.open(x)
        above = torch.where(open_, high / (high - low).clamp(min=1e-300), active).clamp(max=1)
        needed = torch.maximum(-low * above, high * (1 - above)) * (1 + 8 * UNIT)  # for the slope as it is rounded
        intercept = torch.where(open_, needed, torch.zeros_like(low))
        chosen = (high > -low).to(low) if slopes is None else slopes
        below = torch.where(open_, chosen, active)
        return below, torch.zeros_like(low), above, intercept


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

    def lines(self, x: Interval, slopes: Tensor | None = None) -> Lines:
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

    def lines(self, x: Interval, slopes: Tensor | None = None) -> Lines:
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
        return torch.nn.functional.max_pool2d(x[None], *options, return_indices=True)

    def interval(self, inputs: Sequence[Interval]) -> Interval:
        return Interval(*(self._pool(end)[0][0] for end in inputs[0]))

    def backward(self, rows: Tensor, inputs: Sequence[Interval], slopes: Tensor | None = None) -> Step:
        [x] = inputs
        _, best = self._pool(x.center)
        best = best[0]  # (channels, height, width): the place in its channel of the value to follow
        channels = x.low.shape[0]
        flat = best.reshape(channels, -1)
        others = self._without(x.high, flat, best.shape)
        alone = (x.low.reshape(channels, -1).gather(1, flat).reshape(best.shape) >= others).to(rows)
        top = self._pool(x.high)[0][0]
        plus = rows.clamp(min=0)
        kept = plus + (rows - plus) * alone
        result = rows.new_zeros(len(rows), channels, x.low[0].numel())
        result = result.scatter_add(2, flat.expand(len(rows), -1, -1), kept.reshape(len(rows), channels, -1))
        nothing = torch.zeros_like(top)
        windows = math.prod(self.kernel)
        error = x.magnitude.max() * gamma(windows)  # several windows may share a place
        constant = dot(rows, nothing, top * (1 - alone), nothing + error)
        return [result.reshape(len(rows), *x.low.shape)], constant

    def _without(self, high: Tensor, chosen: Tensor, shape: torch.Size) -> Tensor:
        """The largest of all other values in each window."""
        sides: list[int] = []
        for pad, size, step in zip(self.padding, self.kernel, self.dilation, strict=True):
            sides = [pad, pad + size * step, *sides]  # also beyond the border, where windows may end with ceil_mode
        places = torch.arange(high[0].numel(), device=high.device).reshape(1, *high.shape[1:])
        padded = torch.nn.functional.pad(high, sides, value=-math.inf)
        places = torch.nn.functional.pad(places, sides, value=-1)
        result = torch.full(shape, -math.inf, dtype=high.dtype, device=high.device)
        for offsets in itertools.product(*map(range, self.kernel)):
            window = (
                slice(None),
                *(
                    slice(at * step, at * step + (size - 1) * stride + 1, stride)
                    for at, step, size, stride in zip(offsets, self.dilation, shape[1:], self.stride, strict=True)
                ),
            )
            other = places[window] != chosen.reshape(shape)
            result = torch.where(other, torch.maximum(result, padded[window]), result)
        return result
