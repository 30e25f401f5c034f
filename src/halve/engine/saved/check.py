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
from halve.engine.saved import trusting
from halve.engine.saved.operators import schema_of
from halve.engine.saved.plain import reason

MOST_BYTES = 1 << 34  # of one value, for two images: 16 GiB
_MOST_PIECES = 10_000  # tensors that operators return in lists, and weights of recurrent layers, of a network
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
        if schema_of(target) is None:
            _check_numbers(target, args)
            return target(*args)
        if target in _PIECES:
            self.pieces += max(_PIECES[target](_by_name(target, args, named)), 0)
            if self.pieces > _MOST_PIECES:
                raise ValueError(f"it splits tensors into more than {_MOST_PIECES:,} pieces")
        if target in _RECURRENT:
            return _one_step(target, _by_name(target, args, named))
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


def _by_name(target: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operator, with defaults."""
    known = schema_of(target).arguments
    defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(known, args, strict=False)} | dict(named)


def _one_step(target: Callable[..., Any], given: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of a recurrent layer, by way of its first step: PyTorch would compute all, even without memory."""
    x, time = given["input"], 1 if given["batch_first"] else 0
    output, *states = target(**given | {"input": x.narrow(time, 0, 1)})
    return output.new_empty((*x.shape[:2], output.shape[2])), *states


def _along(given: Mapping[str, Any]) -> int:
    return int(given["self"].shape[given["dim"]])


_RECURRENT = (trusting.lstm, _ATEN.gru.input, _ATEN.rnn_relu.input, _ATEN.rnn_tanh.input)
_PIECES: dict[Any, Callable[[Mapping[str, Any]], int]] = {  # how many tensors an operator makes even without memory
    _ATEN.split.Tensor: lambda given: _along(given) // max(given["split_size"], 1),
    _ATEN.unbind.int: _along,
    _ATEN.chunk.default: lambda given: min(given["chunks"], _along(given)),
    _ATEN.tensor_split.sections: lambda given: int(given["sections"]),
    **dict.fromkeys(_RECURRENT, lambda given: len(given["params"])),
}


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """PyTorch logs what fake tensors cannot do; here it is an error message."""
    before, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        yield
    finally:
        _LOGGER.disabled = before
