"""Graphs of compiled networks as JSON and tensors, and back.

A graph is a list of values: first the inputs, then one for each node. A node is a tensor of the file, a layer, or a
call of an operator from the list in `operators.py`; its arguments refer to earlier values by number, and everything
else in them is data. The names in a rebuilt module are made here: no text of a file becomes part of the Python source
that torch.fx generates, except for string arguments, as literals.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from halve.engine.layer import Layer
from halve.engine.lower import get_tensor
from halve.engine.saved.layers import build_layer, describe_layer
from halve.engine.saved.operators import check_arguments, name_of, operator_named
from halve.engine.saved.plain import DTYPES, reason
from halve.errors import EngineError, listed

MOST_NODES = 10_000
_MOST_ITEMS = 4096  # of a list
_MOST_INTEGER = 1 << 63
_MOST_TEXT = 1000  # characters of a string argument
_ATEN = torch.ops.aten
_LEAF = "*"
_KINDS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": collections.OrderedDict}
_RETURN_TYPES = {kind.__name__: kind for kind in torch.return_types.all_return_types}
_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_CONSTANTS: dict[str, Mapping[str, Any]] = {  # what a JSON object in an argument may stand for, besides a value
    "dtype": DTYPES,
    "memory_format": _FORMATS,
    "layout": {"strided": torch.strided},
    "device": {"cpu": torch.device("cpu")},  # networks are stored as if on a CPU, and moved after loading
    "float": _FLOATS,
}
_ZEROED = {  # memory that is not initialised could show what else was in it
    _ATEN.empty.memory_format: _ATEN.zeros.default,
    _ATEN.empty_like.default: _ATEN.zeros_like.default,
    _ATEN.new_empty.default: _ATEN.new_zeros.default,
}


def describe(body: GraphModule, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A graph on a device as JSON, and its tensors. Raises `EngineError` if it contains something else."""
    numbers: dict[Node, int] = {}
    nodes: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"nodes": nodes}
    for number, node in enumerate(sorted(body.graph.nodes, key=lambda node: node.op != "placeholder")):
        try:
            if node.op == "output":
                plain["outputs"] = [_plain(value, numbers, device) for value in node.args[0]]
                plain["structure"] = _structure(_outputs(body, len(node.args[0])))
            elif node.op != "placeholder":
                entry, held = _described(body, node, numbers, device)
                nodes.append(entry)
                tensors |= {f"{number}.{name}": tensor for name, tensor in held.items()}
        except ValueError as error:
            raise EngineError(f"the network cannot be saved: {node.name}: {reason(error)}") from error
        numbers[node] = number
    if len(nodes) > MOST_NODES:
        raise EngineError(f"the network cannot be saved: it has {len(nodes):,} nodes, more than {MOST_NODES:,}")
    return plain, tensors


def _described(
    body: GraphModule, node: Node, numbers: Mapping[Node, int], device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    target, given, named = _simplified(node)
    args = [_plain(value, numbers, device) for value in given]
    if node.op == "call_module":
        layer = body.get_submodule(str(node.target))
        if not isinstance(layer, Layer) or node.kwargs:
            raise ValueError(f"it runs a {type(layer).__name__}, which is not a layer of the engine")
        described, tensors = describe_layer(layer)
        return {"layer": described, "args": args}, tensors
    if node.op == "get_attr":
        return {"tensor": None}, {"tensor": get_tensor(body, str(node.target))}
    plain: dict[str, Any] = {"call": name_of(target), "args": args}
    if named:
        plain["named"] = {name: _plain(value, numbers, device) for name, value in named.items()}
    return plain, {}


def _simplified(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The target and arguments of a node, as files hold them."""
    target: Any = node.target
    args, named = node.args, dict(node.kwargs)
    if target is _ATEN._assert_scalar.default:
        args = (args[0], "a size is not what the network was captured for")  # not an expression of any length
    elif target in _ZEROED:
        target = _ZEROED[target]
        named.pop("memory_format", None)
    return target, args, named


def _plain(value: Any, numbers: Mapping[Node, int], device: torch.device) -> Any:
    """An argument as JSON."""
    if isinstance(value, Node):
        return {"value": numbers[value]}
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return [_plain(inner, numbers, device) for inner in value]
    if isinstance(value, torch.device) and value.type == device.type:
        return {"device": "cpu"}
    if isinstance(value, float):
        return {"float": str(value)}
    for kind, known in _CONSTANTS.items():
        for name, constant in known.items():
            if type(constant) is type(value) and constant == value:
                return {kind: name}
    raise ValueError(f"it has the argument {value!r}, which files cannot contain")


def _text(text: str) -> str:
    if not text.isascii() or not text.isprintable() or len(text) > _MOST_TEXT:
        raise ValueError(f"text must be printable ASCII of at most {_MOST_TEXT} characters, got {text[:40]!r}")
    return text


def _outputs(body: GraphModule, count: int) -> Any:
    """The outputs of the network in their containers, with `_LEAF` for each."""
    info = body.graph._codegen.pytree_info  # type: ignore[attr-defined]
    return pytree.tree_unflatten([_LEAF] * count, info.out_spec)


def _structure(outputs: Any) -> Any:
    """Nested containers as JSON: `[kind, items]`, and for dictionaries `[kind, keys, items]`."""
    if outputs is _LEAF:
        return _LEAF
    for name, kind in {**_KINDS, **_RETURN_TYPES}.items():
        if type(outputs) is not kind:
            continue
        if not isinstance(outputs, dict):
            return [name, [_structure(item) for item in outputs]]
        if all(type(key) in (str, int) for key in outputs):
            return [name, list(outputs), [_structure(item) for item in outputs.values()]]
    raise ValueError(
        f"it returns a {type(outputs).__name__}; only tensors in tuples, lists and dictionaries with texts or integers "
        "as keys can be saved"
    )


def build(plain: Mapping[str, Any], tensors: Mapping[str, Tensor], inputs: int) -> GraphModule:
    """The graph from its description, with this many inputs. Raises `ValueError` if it is not valid."""
    entries, outputs = plain["nodes"], plain["outputs"]
    if not isinstance(entries, list) or not isinstance(outputs, list) or len(entries) > MOST_NODES:
        raise ValueError(f"nodes and outputs must be lists, with at most {MOST_NODES:,} nodes")
    names = [f"x{number}" for number in range(inputs)]
    graph, owned = Graph(), _by_number(tensors)
    held: dict[str, Any] = {}  # tensors and layers, by the name that the graph calls them
    values = [graph.placeholder(name) for name in names]
    for number, entry in enumerate(entries, start=inputs):
        try:
            values.append(_node(graph, entry, owned.pop(str(number), {}), values, held))
        except Exception as error:  # kernel families and PyTorch may raise anything on tensors that do not fit
            raise ValueError(f"node {number}: {reason(error)}") from error
    if owned:
        raise ValueError(f"it has tensors that belong to no node: {listed(owned)}")
    graph.output(tuple(_argument(value, values) for value in outputs))
    leaves, structure = pytree.tree_flatten(_containers(plain["structure"]))
    if len(leaves) != len(outputs):
        raise ValueError(f"it has {len(outputs)} outputs, and a structure for {len(leaves)}")
    arguments = pytree.tree_structure(((_LEAF,) * inputs, {}))
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, arguments, structure)))
    return GraphModule(held, graph).eval()


def _by_number(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each node, by its number and their names."""
    owned: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        number, _, name = full_name.partition(".")
        owned.setdefault(number, {})[name] = tensor
    return owned


def _node(graph: Graph, entry: Any, tensors: dict[str, Tensor], values: Sequence[Node], held: dict[str, Any]) -> Node:
    match entry:
        case {"tensor": None, **rest} if not rest and tensors.keys() == {"tensor"}:
            held[name := f"tensor{len(held)}"] = tensors["tensor"]
            return graph.get_attr(name)
        case {"layer": described, "args": list(args), **rest} if not rest:
            held[name := f"layer{len(held)}"] = build_layer(described, tensors)
            return graph.call_module(name, tuple(_argument(value, values) for value in args))
        case {"call": str(name), "args": list(args), **rest} if rest.keys() <= {"named"} and not tensors:
            target: Callable[..., Any] = operator_named(name)
            plain: Any = rest.get("named", {})
            if not isinstance(plain, dict):
                raise ValueError("named arguments must be a JSON object")
            given = tuple(_argument(value, values) for value in args)
            named = {key: _argument(value, values) for key, value in plain.items()}
            check_arguments(target, given, named)
            return graph.call_function(target, given, named)
    raise ValueError("it must be a tensor, a layer or a call, with its own tensors and no others")


def _argument(value: Any, values: Sequence[Node]) -> Any:
    """An argument from JSON."""
    match value:
        case None | bool() | float():
            return value
        case int() if -_MOST_INTEGER <= value < _MOST_INTEGER:
            return value
        case str():
            return _text(value)
        case list() if len(value) <= _MOST_ITEMS:
            return [_argument(inner, values) for inner in value]
        case {"value": number, **rest} if not rest and type(number) is int and 0 <= number < len(values):
            return values[number]
        case dict() if len(value) == 1:
            [(kind, name)] = value.items()
            if isinstance(name, str) and name in _CONSTANTS.get(kind, {}):
                return _CONSTANTS[kind][name]
    raise ValueError(f"{str(value)[:60]!r} is not a valid argument, or refers to no earlier value")


def _containers(structure: Any) -> Any:
    """Containers from JSON, with `_LEAF` for each output."""
    match structure:
        case "*":
            return _LEAF
        case ["dict" | "OrderedDict" as name, list(keys), list(items)] if (
            len(keys) == len(items) == len({(type(key), key) for key in keys if type(key) in (str, int)})
        ):
            return _KINDS[name](zip(keys, map(_containers, items), strict=True))
        case ["tuple" | "list" as name, list(items)]:
            return _KINDS[name](map(_containers, items))
        case [str(name), list(items)] if name in _RETURN_TYPES:
            return _RETURN_TYPES[name](map(_containers, items))
    raise ValueError(f"{str(structure)[:60]!r} is not a valid structure of outputs")
