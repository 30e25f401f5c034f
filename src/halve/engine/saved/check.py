"""Check that a graph from a file runs, without running it: on fake tensors, which have a shape and no memory.

This checks the number, types and shapes of all arguments, and bounds what the network computes. Values that depend on
the numbers in a tensor, such as the result of `nonzero`, stay unknown, and so do the results of the few operators that
need memory; what is computed from them is not checked.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from halve.engine.kernels.registry import FALLBACK, family_of
from halve.engine.layer import Layer
from halve.engine.lower import get_tensor
from halve.engine.saved.plain import reason

MOST_BYTES = 1 << 34  # of one value, for two images: 16 GiB
_MOST_PIECES = 10_000  # tensors that operators return in lists, of a network
_MOST_INTEGER = 1 << 63
_ATEN = torch.ops.aten
_UNKNOWN = object()
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


class Spec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def check_runs(body: GraphModule, inputs: Sequence[Tensor]) -> None:
    """Raise `ValueError` if a graph on a CPU does not run on such inputs, or computes something too large."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)  # nothing runs for real
    mode.cache_enabled = False  # the cache is never emptied
    with mode, torch.no_grad(), _silenced():
        run = _Run(body, [torch.empty(x.shape, dtype=x.dtype) for x in inputs])
        for number, node in enumerate(body.graph.nodes):
            try:
                run.step(node)
            except Exception as error:  # operators may raise anything on arguments that do not fit
                raise ValueError(f"node {number} ({node.target}): {reason(error)}") from error
    for layer, given, result in run.layers:
        try:
            _check_kernels(layer, given, result)
        except Exception as error:  # and so may kernel families
            raise ValueError(f"layer {layer.name}: {reason(error)}") from error


class _Run:
    """One run of a graph, node by node."""

    def __init__(self, body: GraphModule, inputs: Sequence[Tensor]) -> None:
        self.body, self.inputs = body, iter(inputs)
        self.values: dict[Node, Any] = {}
        self.layers: list[tuple[Layer, list[Spec], Spec]] = []  # with their inputs and results
        self.pieces = 0

    def step(self, node: Node) -> None:
        args: Any = map_aggregate(node.args, self._value)
        named: Any = map_aggregate(dict(node.kwargs), self._value)
        result: Any = None
        if node.op == "placeholder":
            result = next(self.inputs)
        elif node.op == "get_attr":
            result = get_tensor(self.body, str(node.target))
        elif any(self.values[read] is _UNKNOWN for read in node.all_input_nodes):
            result = _UNKNOWN
        elif node.op == "call_module":
            result = self._run_layer(self.body.get_submodule(str(node.target)), *args)
        elif node.op == "call_function":
            result = self._call(node.target, args, named)
        _check_size(result)
        self.values[node] = result

    def _value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, Node) else argument

    def _call(self, target: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not isinstance(target, OpOverload):
            _check_numbers(target, args)
            return target(*args)
        given = _by_name(target, args, named)
        if target in _CHECKS:
            _CHECKS[target](given)
        if target in _GATES:
            return _recurrent(given, _GATES[target])
        if target in _PIECES:
            self.pieces += max(_PIECES[target](given), 0)
            if self.pieces > _MOST_PIECES:
                raise ValueError(f"it splits tensors into more than {_MOST_PIECES:,} pieces")
        try:
            return target(*args, **named)
        except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException):
            return _UNKNOWN

    def _run_layer(self, layer: Any, x: Tensor, *residual: Tensor) -> Tensor:
        operation, inputs = layer.operation, [x, *residual]
        if layer.has_weight:
            inputs = [value.to(layer.dtype) for value in inputs]
        vectors = dict.fromkeys(("bias", "scale"), (operation.rows,)) if layer.has_weight else {}
        shapes = {"weight": operation.weight_shape, **vectors} if layer.has_weight else {}
        result: Tensor = operation.reference(
            inputs, {name: torch.empty(shape, dtype=layer.dtype) for name, shape in shapes.items()}
        )
        if len(inputs) > 1 + layer.has_weight or any(value.shape != result.shape for value in inputs[1:]):
            raise ValueError(f"it may only have one more input, of the shape of the result, {tuple(result.shape)}")
        specs = [Spec(tuple(value.shape), value.dtype) for value in (*inputs, result)]
        self.layers.append((layer, specs[:-1], specs[-1]))
        return result


def _check_kernels(layer: Layer, inputs: Sequence[Spec], result: Spec) -> None:
    """Check every kernel of a layer on the meta device."""
    for kernel in {*layer.kernels.values()} or {FALLBACK}:
        family = family_of(kernel)
        given = [family.reads.of(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in inputs]
        packed = {name: tensor.to("meta") for name, tensor in layer.packed(kernel.family).items()}
        if tuple(family.run(given, packed, layer.operation, kernel.variant).shape) != result.shape:
            raise ValueError(f"{kernel} does not return the shape {result.shape}")


def _check_size(value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() * value.element_size() > MOST_BYTES:
        raise ValueError(f"a value of shape {tuple(value.shape)} is too large: {MOST_BYTES:,} bytes at most")
    if isinstance(value, int) and not -_MOST_INTEGER <= value < _MOST_INTEGER:
        raise ValueError("an integer is too large: 64 bits at most")
    if isinstance(value, list | tuple):
        for item in value:
            _check_size(item)


def _check_numbers(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Check the arguments of a Python function: numbers, which are never multiplied into something huge."""
    if function is operator.getitem:
        container, index = args
        if not isinstance(container, list | tuple) or type(index) is not int:
            raise ValueError("getitem must have a list of values and an integer")
        return
    numbers = args[0] if function is torch.sym_sum else args
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("its arguments must be numbers")
    if function is operator.pow and not isinstance(args[0], float) and not -64 <= args[1] <= 64:
        raise ValueError("the exponent of an integer must be at most 64")


def _by_name(target: OpOverload, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operator, with defaults."""
    known = target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(known, args, strict=False)} | dict(named)


def _check_norm(given: Mapping[str, Any]) -> None:
    channels = given["input"].shape[1]
    for name in ("weight", "bias", "running_mean", "running_var"):
        if (values := given.get(name)) is not None and tuple(values.shape) != (channels,):
            raise ValueError(f"{name} must have shape ({channels},), got {tuple(values.shape)}")


def _check_weight_norm(given: Mapping[str, Any]) -> None:
    v, g, dim = given["v"], given["g"], given["dim"]
    if dim in (0, v.dim() - 1) and tuple(g.shape) != tuple(size if d == dim else 1 for d, size in enumerate(v.shape)):
        raise ValueError(f"g must have one value for each index along dimension {dim} of {tuple(v.shape)}")


def _along(given: Mapping[str, Any]) -> int:
    return int(given["self"].shape[given["dim"]])


def _recurrent(given: Mapping[str, Any], gates: int) -> tuple[Tensor, ...]:
    """The results of a recurrent layer, which PyTorch would compute step by step even without memory."""
    x, states = given["input"], given["hx"] if isinstance(given["hx"], list) else [given["hx"]]
    directions, layers, hidden = 1 + given["bidirectional"], given["num_layers"], states[0].shape[-1]
    rows = gates * hidden
    shapes: list[list[tuple[int, ...]]] = []
    for channels in (x.shape[2], directions * hidden):  # of the first layer, and of the others
        biases = [(rows,)] * 2 if given["has_biases"] else []
        shapes.append([(rows, channels), (rows, hidden), *biases] * directions)
    found = [tuple(tensor.shape) for tensor in given["params"]]
    if x.dim() != 3 or len(found) != layers * len(shapes[0]) or found != shapes[0] + shapes[1] * (layers - 1):
        raise ValueError("the weights of a recurrent layer do not fit its input and states")
    batch = x.shape[0 if given["batch_first"] else 1]
    if any(tuple(state.shape) != (layers * directions, batch, hidden) for state in states):
        raise ValueError("the states of a recurrent layer do not fit its input")
    return x.new_empty((*x.shape[:2], directions * hidden)), *map(torch.empty_like, states)


_CHECKS: dict[Any, Callable[[Mapping[str, Any]], None]] = {  # of arguments that PyTorch itself takes on trust
    _ATEN._native_batch_norm_legit_no_training.default: _check_norm,
    _ATEN._native_batch_norm_legit.no_stats: _check_norm,
    _ATEN._weight_norm.default: _check_weight_norm,
}
_PIECES: dict[Any, Callable[[Mapping[str, Any]], int]] = {  # how many tensors an operator makes even without memory
    _ATEN.split.Tensor: lambda given: _along(given) // max(given["split_size"], 1),
    _ATEN.unbind.int: _along,
    _ATEN.chunk.default: lambda given: min(given["chunks"], _along(given)),
    _ATEN.tensor_split.sections: lambda given: int(given["sections"]),
}
_GATES = {_ATEN.lstm.input: 4, _ATEN.gru.input: 3, _ATEN.rnn_relu.input: 1, _ATEN.rnn_tanh.input: 1}


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """PyTorch logs what fake tensors cannot do; here it is an error message."""
    before, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        yield
    finally:
        _LOGGER.disabled = before
