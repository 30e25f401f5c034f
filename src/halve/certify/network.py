"""A captured network as a list of operators with bounds, in float64.

What the graph computes from constants alone is computed once. BatchNorm becomes a scale, LayerNorm three operators. An
operation without bounds is an error that names its module.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from halve.certify import operators as ops
from halve.certify.rounding import Interval, check_products
from halve.errors import ModelError, listed
from halve.graph import Part, capture
from halve.modules import clone, device_of, weight_name

BOUNDED = (
    "convolutions, Linear, BatchNorm, LayerNorm, sums, factors, ReLU, ReLU6, clamp, GELU, SiLU, sigmoid, tanh, average "
    "and max pooling, slicing, splitting, padding, concatenation and reshaping"
)
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Node:
    """An operator and the nodes that it reads; the input of the network has none."""

    operator: ops.Operator | None
    inputs: tuple[int, ...]
    module: str


@dataclass(frozen=True)
class Network:
    """Nodes in order of computation; the first is the input, the last the class scores of one image.

    Args:
        nodes: The nodes.
        largest: The largest number of values of a node, for one image.
        derived: Names of parameters that the network also computes other things from than products of layers.
    """

    nodes: tuple[Node, ...]
    largest: int
    derived: frozenset[str] = frozenset()

    def to_(self, device: torch.device) -> "Network":
        """Move the operators to a device."""
        for node in self.nodes:
            if node.operator is not None:
                node.operator.to_(device)
        return self

    @property
    def layers(self) -> dict[str, list[ops.Layer]]:
        """The layers with weights by name; a layer that is called twice has two."""
        found: dict[str, list[ops.Layer]] = {}
        for node in self.nodes:
            if isinstance(node.operator, ops.Layer):
                found.setdefault(node.operator.name, []).append(node.operator)
        return found

    def check_changes(self, layers: Iterable[str]) -> None:
        """Raise `ModelError` if a change of these layers' weights would also change what counts as constant."""
        if wrong := [weight_name(layer) for layer in layers if weight_name(layer) in self.derived]:
            raise ModelError(
                f"certify bounds changes of weights that only their layers multiply by, but the network also computes "
                f"something else from {listed(wrong)}: leave these layers out, or certify flips instead"
            )


def network_of(model: nn.Module, example: Tensor) -> Network:
    """Capture a model for images of the example's shape. Raises `ModelError` for operations without bounds.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> [type(node.operator).__name__ for node in network_of(model, torch.zeros(1, 3, 4, 4)).nodes[1:]]
    ['Convolution', 'Scale', 'ReLU', 'Function', 'Product']
    """
    copy, device = clone(model).eval().double().cpu().requires_grad_(False), device_of(model)
    check_products(device)
    captured = capture(copy, example.double().cpu())
    if not captured.complete:
        raise ModelError(
            f"{type(model).__name__} cannot be captured as one graph, which bounds need: {captured.reason}; certify "
            f"flips instead, which work for any network"
        )
    [part] = captured.parts
    with torch.no_grad():
        return _Builder(part).network().to_(device)


@dataclass(frozen=True)
class _Value:
    """A value that depends on the input: the number of its node, and its shape without the batch."""

    node: int
    shape: torch.Size


class _Size:
    """A number that depends on the batch size."""

    def __init__(self, of: Callable[[int], int]) -> None:
        self.of = of


class _Builder:
    """Builds a network from a captured graph, node by node."""

    def __init__(self, part: Part) -> None:
        self._part, self._nodes = part, [Node(None, (), "")]
        self._module, self._largest = "", 1
        self._names: dict[fx.Node, str] = {}
        self._derived: set[str] = set()

    def network(self) -> Network:
        values: dict[fx.Node, Any] = {}
        constants = self._constants()
        output: Any = None
        for node in self._part.graph.nodes:
            if node.op == "placeholder":
                values[node] = constants.get(node.name)
                self._names[node] = self._part.tensors.get(node.name, "")
                if node.name not in constants:
                    values[node] = self._input(node, values)
            elif node.op == "call_function":
                self._module = self._part.module_of(node)
                values[node] = self._call(node, values)
            elif node.op == "output":
                output = fx.node.map_arg(node.args[0], values.__getitem__)
        found = output[0] if isinstance(output, tuple | list) and len(output) == 1 else output
        if not isinstance(found, _Value) or len(found.shape) != 1:
            raise ModelError("bounds need a network that returns class scores (images, classes) and nothing else")
        if found.node != len(self._nodes) - 1:  # what comes after it is not used
            self._nodes = self._nodes[: found.node + 1]
        return Network(tuple(self._nodes), self._largest, frozenset(self._derived))

    def _constants(self) -> dict[str, Any]:
        """Parameters, buffers and other tensors by the name of their placeholder."""
        program = self._part.program
        signature, held = program.graph_signature, {**program.state_dict, **program.constants}
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names |= dict(signature.inputs_to_lifted_tensor_constants)
        return {placeholder: held[name].detach() for placeholder, name in names.items()}

    def _input(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> _Value:
        if any(isinstance(value, _Value) for value in values.values()):
            raise ModelError("bounds need a network with one input, a tensor of images")
        return _Value(0, node.meta["val"].shape[1:])

    def _add(self, operator_: ops.Operator, *inputs: _Value) -> _Value:
        """Add a node; its shape is found by running it on zeros."""
        zeros = [Interval(zero, zero) for zero in (_zeros(1, *x.shape) for x in inputs)]
        shape = operator_.interval(zeros).low.shape[1:]
        if not shape:
            where = self._module or "(the network itself)"
            raise ModelError(f"certify has no bounds for a single value per image, in module {where}")
        self._largest = max(self._largest, shape.numel())
        self._nodes.append(Node(operator_, tuple(x.node for x in inputs), self._module))
        return _Value(len(self._nodes) - 1, shape)

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        args: Any = fx.node.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        layer = node.target in _LAYERS and isinstance(args[0], _Value)
        others = [one for one in node.all_input_nodes if not (layer and one is node.args[1])]
        self._derived.update(self._names[one] for one in others if self._names.get(one))
        if node.target is _ATEN.sym_size.int:
            source, dim = args
            return _Size(lambda n: n) if dim == 0 and isinstance(source, _Value) else source.shape[dim - 1]
        if not any(isinstance(leaf, _Value) for leaf in leaves):
            sizes = [leaf for leaf in leaves if isinstance(leaf, _Size)]
            if not sizes:
                return node.target(*args, **kwargs)  # type: ignore[operator]
            return _Size(lambda n: node.target(*_sized(args, n), **_sized(kwargs, n)))  # type: ignore[operator]
        rule = RULES.get(node.target)
        if rule is None:
            raise self._unknown(node)
        found = rule(self, node, args, kwargs)
        if found is None:
            raise self._unknown(node)
        return found

    def _unknown(self, node: fx.Node) -> ModelError:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        return ModelError(
            f"certify has no bounds for {name} in module {self._module or '(the network itself)'}; bounds exist for "
            f"{BOUNDED}. Certify flips instead, which work for any network"
        )

    def layer_name(self, weight: Any) -> str:
        """The name of the layer that a weight argument belongs to."""
        name = self._names.get(weight, "")
        if name == "weight":  # the network itself is a layer
            return ""
        return name.removesuffix(".weight") if name.endswith(".weight") else name or self._module


Rule = Callable[[_Builder, fx.Node, Sequence[Any], Mapping[str, Any]], Any]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _sized(arguments: Any, batch: int) -> Any:
    """Arguments with numbers in place of those that depend on the batch size."""
    return torch.utils._pytree.tree_map(lambda x: x.of(batch) if isinstance(x, _Size) else x, arguments)


def _function(target: Any, terms: Callable[[torch.Size, Sequence[Any]], int] | None = None) -> Rule:
    """The rule of an operation that moves or averages the values of its first argument."""

    def rule(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        x, *rest = args
        if not isinstance(x, _Value) or any(isinstance(one, _Value) for one in rest):
            return None
        options = {name: value for name, value in kwargs.items() if name != "device"}  # it is captured on the CPU

        def run(batch: Tensor) -> Tensor:
            return target(batch, *_sized(rest, len(batch)), **_sized(options, len(batch)))  # type: ignore[no-any-return]

        ones = _zeros(1, *x.shape) + 1
        try:
            alone, probe = run(ones), run(torch.cat([0 * ones, ones]))
        except RuntimeError:
            return None  # only for the number of images that was captured
        if probe.shape != (2, *alone.shape[1:]) or probe.dtype != torch.float64:
            return None  # moves images between each other, or changes the dtype
        if bool(probe[0].any()) or not torch.allclose(probe[1], alone[0]):
            return None  # pads with other values than 0, or mixes images
        reads = ops.Function(run, 0).transpose(torch.ones_like(alone), x.shape)
        if bool((reads < 0).any()):
            return None  # bounds of sizes need coefficients that are not negative
        if not torch.allclose(reads.sum(), alone.sum(), rtol=1e-9):
            return None  # its derivative, which is how it is transposed, leaves something out
        if terms is not None:
            return builder._add(ops.Function(run, terms(x.shape, rest)), x)
        # what reads a value more than once, as reflecting padding does, has a transpose that adds up
        most = int(reads.max())
        return builder._add(ops.Function(run, most if most > 1 else 0), x)

    return rule


def _all(shape: torch.Size, rest: Sequence[Any]) -> int:
    return math.prod(shape)


def _convolution(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = dict(zip(("x", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False)) | dict(
        kwargs
    )
    x, weight, bias, padding = named["x"], named["weight"], named.get("bias"), named.get("padding", [0])
    spatial = weight.dim() - 2 if isinstance(weight, Tensor) else 0
    if not isinstance(x, _Value) or not spatial or isinstance(bias, _Value) or len(x.shape) != spatial + 1:
        return None
    stride, dilation = named.get("stride", [1]), named.get("dilation", [1])
    if padding == "valid":
        padding = [0]
    elif padding == "same":
        steps = list(dilation) * (spatial // len(dilation))
        around = [step * (taps - 1) for step, taps in zip(steps, weight.shape[2:], strict=True)]
        if any(both % 2 for both in around):
            return None  # more on one side than on the other
        padding = [both // 2 for both in around]
    name = builder.layer_name(node.args[1])
    return builder._add(ops.Convolution(name, weight, bias, stride, padding, dilation, named.get("groups", 1)), x)


def _linear(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    if not isinstance(x, _Value) or not isinstance(weight, Tensor) or isinstance(bias, _Value):
        return None
    return builder._add(ops.Product(builder.layer_name(node.args[1]), weight, bias), x)


def _batch_norm(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, weight, bias, mean, variance, _, eps = args
    if not isinstance(x, _Value):
        return None
    factor = (variance + eps).rsqrt() * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - mean * factor
    size = (mean * factor).abs() + (0.0 if bias is None else bias.abs())
    shape = (-1, *[1] * (len(x.shape) - 1))
    return (builder._add(ops.Scale(factor.reshape(shape), shift.reshape(shape), size.reshape(shape)), x),)


def _getitem(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, index = args
    return source[index] if isinstance(source, tuple | list) and index < len(source) else None


def _layer_norm(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, shape, *rest = args
    weight, bias, eps = [*rest, *[None, None, 1e-5][len(rest) :]][:3]
    count = math.prod(shape)
    centred = builder._add(ops.Centre(len(shape), count), x)
    found = builder._add(ops.Normalise(len(shape), eps, count), centred)
    if weight is None and bias is None:
        return found
    factor = _zeros(*shape) + 1 if weight is None else weight
    return builder._add(ops.Scale(factor, bias), found)


def _sum(sign: float) -> Rule:
    def rule(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        one, other = args
        if kwargs.get("alpha", 1) != 1:
            return None
        if isinstance(one, _Value) and isinstance(other, _Value):
            return builder._add(ops.Sum(sign), one, other)
        constant = other if isinstance(one, _Value) else one
        x = one if isinstance(one, _Value) else other
        shift = _without_batch(constant, x.shape)
        if shift is None:
            return None
        same, flipped = (1.0, sign) if x is one else (sign, 1.0)
        ones = _zeros(*[1] * len(x.shape)) + same
        return builder._add(ops.Scale(ones, flipped * shift), x)

    return rule


def _times(inverse: bool) -> Rule:
    def rule(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        one, other, *rest = args
        x, constant = (one, other) if isinstance(one, _Value) else (other, one)
        if isinstance(constant, _Value) or rest or kwargs or (inverse and x is not one):
            return None
        factor = _without_batch(constant, x.shape)
        if factor is None:
            return None
        return builder._add(ops.Scale(1 / factor if inverse else factor), x)

    return rule


def _without_batch(constant: Any, shape: torch.Size) -> Tensor | None:
    """A constant that is broadcast to images of a shape, without its batch dimension."""
    if isinstance(constant, _Size):
        return None
    tensor = torch.as_tensor(constant, dtype=torch.float64)
    if tensor.dim() == len(shape) + 1:
        if tensor.shape[0] != 1:
            return None
        tensor = tensor[0]
    try:
        fits = torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        fits = False
    return tensor if fits else None


def _elementwise(make: Callable[[Sequence[Any], Mapping[str, Any]], ops.Operator | None]) -> Rule:
    def rule(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = make(args[1:], kwargs)
        return None if found is None else builder._add(found, args[0])

    return rule


def _curve(name: str) -> Rule:
    return _elementwise(lambda args, kwargs: ops.Smooth(ops.CURVES[name]))


def _gelu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ops.Operator:
    return ops.Smooth(ops.CURVES["gelu, tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu"])


def _clamp(low: float | None = None, high: float | None = None) -> Rule:
    """The rule of min(max(x, a), b) with these ends by default: ReLU6 and its relatives."""

    def rule(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        named = dict(zip(("min", "max"), args[1:], strict=False)) | dict(kwargs)
        return _clamped(builder, args[0], named.get("min", low), named.get("max", high))

    return rule


def _clamp_max(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _clamped(builder, args[0], None, args[1])


def _clamped(builder: _Builder, x: _Value, low: Any, high: Any) -> Any:
    """a + max(x - a, 0), or b - max(b - x, 0), or a + max(x - a, 0) - max(x - b, 0)."""
    ends = [end for end in (low, high) if end is not None]
    if not ends or not all(isinstance(end, int | float) for end in ends) or ends[0] > ends[-1]:
        return None
    one = _zeros(*[1] * len(x.shape)) + 1
    if low is None:
        flipped = builder._add(ops.ReLU(), builder._add(ops.Scale(-one, high * one), x))
        return builder._add(ops.Scale(-one, high * one), flipped)
    parts = [builder._add(ops.ReLU(), builder._add(ops.Scale(one, -end * one), x)) for end in ends]
    found = builder._add(ops.Sum(-1.0), *parts) if high is not None else parts[0]
    return builder._add(ops.Scale(one, low * one), found)


def _negated(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """-x, or b - x."""
    x, *shift = args
    if len(shift) > 1 or kwargs or not all(isinstance(one, int | float) for one in shift):
        return None
    one = _zeros(*[1] * len(x.shape)) + 1
    return builder._add(ops.Scale(-one, shift[0] * one if shift else None), x)


def _pieces(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Several pieces of a value: each is a node."""
    target: Any = node.target
    count = len(target(_zeros(1, *args[0].shape), *args[1:], **kwargs))

    def piece(index: int) -> Callable[..., Tensor]:
        return lambda *some, **options: target(*some, **options)[index]

    found = [_function(piece(index))(builder, node, args, kwargs) for index in range(count)]
    return found if all(isinstance(one, _Value) for one in found) else None


def _max_pool(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, kernel, *rest = args
    defaults: list[Any] = [[], [0, 0], [1, 1], False]
    stride, padding, dilation, ceil = list(rest) + defaults[len(rest) :]
    if len(x.shape) != 3:
        return None
    found = builder._add(ops.MaxPool(_pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation), ceil), x)
    return found if node.target is _ATEN.max_pool2d.default else (found,)


def _pair(values: Sequence[int]) -> list[int]:
    return list(values) * (2 // len(values))


def _concatenation(builder: _Builder, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(part, _Value) for part in parts) or dim in (0, -1 - len(parts[0].shape)):
        return None
    return builder._add(ops.Concatenation(dim - 1 if dim > 0 else dim), *parts)


_MOVES = (
    *(
        _ATEN.view.default,
        _ATEN.reshape.default,
        _ATEN._unsafe_view.default,
        _ATEN.permute.default,
        _ATEN.clone.default,
    ),
    *(_ATEN.transpose.int, _ATEN.flatten.using_ints, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
    *(_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.pad.default, _ATEN.constant_pad_nd.default, _ATEN.alias.default),
    *(_ATEN.contiguous.default, _ATEN._to_copy.default),
)
_AVERAGES = (  # these, or their transposes, add up
    *(_ATEN.expand.default, _ATEN.mean.dim, _ATEN.sum.dim_IntList, _ATEN.avg_pool1d.default, _ATEN.avg_pool2d.default),
    *(_ATEN.adaptive_avg_pool2d.default, _ATEN.adaptive_avg_pool1d.default, _ATEN._adaptive_avg_pool2d.default),
)
_CONVOLUTIONS = (_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default, _ATEN.conv2d.padding)
_LAYERS = (*_CONVOLUTIONS, _ATEN.linear.default)
RULES: dict[Any, Rule] = {
    **{target: _function(target) for target in _MOVES},
    **{target: _function(target, _all) for target in _AVERAGES},
    _ATEN.detach.default: _function(_ATEN.alias.default),  # which has a derivative
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    _ATEN.linear.default: _linear,
    _ATEN._native_batch_norm_legit_no_training.default: _batch_norm,
    operator.getitem: _getitem,
    _ATEN.layer_norm.default: _layer_norm,
    _ATEN.add.Tensor: _sum(1.0),
    _ATEN.sub.Tensor: _sum(-1.0),
    _ATEN.mul.Tensor: _times(inverse=False),
    _ATEN.div.Tensor: _times(inverse=True),
    _ATEN.relu.default: _elementwise(lambda args, kwargs: ops.ReLU()),
    _ATEN.relu6.default: _clamp(0.0, 6.0),
    _ATEN.hardtanh.default: _clamp(-1.0, 1.0),
    **dict.fromkeys((_ATEN.clamp.default, _ATEN.clamp_min.default), _clamp()),
    _ATEN.clamp_max.default: _clamp_max,
    **dict.fromkeys((_ATEN.neg.default, _ATEN.rsub.Scalar), _negated),
    **dict.fromkeys((_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.chunk.default), _pieces),
    _ATEN.gelu.default: _elementwise(_gelu),
    _ATEN.silu.default: _curve("silu"),
    _ATEN.sigmoid.default: _curve("sigmoid"),
    _ATEN.tanh.default: _curve("tanh"),
    _ATEN.max_pool2d.default: _max_pool,
    _ATEN.max_pool2d_with_indices.default: _max_pool,
    _ATEN.cat.default: _concatenation,
}
