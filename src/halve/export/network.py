"""Turn a masked network into an ONNX graph: channels moved, BatchNorm folded, in one dtype, with a dynamic batch."""

import ast
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument
from torch.fx import Node

from halve.errors import ModelError, first_line, listed
from halve.export.fold import add_biases_, drop_identities_, fold_, overflows, owner, thaw_
from halve.export.weights import PRODUCTS
from halve.graph import TRACING_LOCK, Part, capture
from halve.modules import clone, convert_, kind_of, plain_weight_, weight_sources

OPSET = 20  # what all of TensorRT 10 reads; quantisation of float16 needs 19
_BFLOAT16_OPSET = 22  # the first whose convolution takes bfloat16
BATCH = "batch"
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Network:
    """A folded network, ready to be exported in several dtypes.

    Args:
        module: In float32, in eval mode.
        inputs: Example inputs, in float32.
        folded: The norms that became identities.
        input_names: The names of its inputs.
        output_names: The names of its outputs.
        prefix: The name of the user's model inside of the module; "" if it is the module.
        parts: The graphs that were captured so far, by dtype.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    folded: list[str]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    prefix: str = ""
    parts: dict[torch.dtype, Part] = field(default_factory=dict)

    def outputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """What the network computes in a dtype, with PyTorch."""
        return outputs_of(_in_dtype(self.module, dtype), tuple(_cast(x, dtype) for x in self.inputs))

    def check_fits(self, dtype: torch.dtype) -> None:
        """Raise `ModelError` if a dtype cannot hold the network's weights."""
        if wide := overflows(self.module, dtype):
            raise ModelError(
                f"{listed(wide, 4)} cannot be cast to {str(dtype).removeprefix('torch.')}: values overflow; "
                f"export in float32 or bfloat16"
            )

    def to_onnx(self, dtype: torch.dtype) -> Any:
        """The network as a ModelProto whose weights and inputs have the dtype."""
        if dtype not in self.parts:
            self.parts[dtype] = _captured(self.module, self.inputs, dtype)
        part = self.parts[dtype]
        drop_identities_(part, self.folded)
        _keep_tensors_(part)
        part.program.state_dict.update(_in_dtype(self.module, dtype).state_dict(keep_vars=True))
        opset = _BFLOAT16_OPSET if dtype == torch.bfloat16 else OPSET
        with TRACING_LOCK, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                program = torch.onnx.export(
                    part.program, dynamo=True, opset_version=opset, verbose=False, external_data=False
                )
            except Exception as error:  # the exporter fails in many ways on unsupported operators
                raise ModelError(
                    f"torch.onnx cannot export {type(self.module).__name__}: {first_line(error.__cause__ or error)}; "
                    f"see https://pytorch.org/docs/stable/onnx.html for what it supports"
                ) from error
        assert program is not None
        model: Any = program.model_proto
        _name_(model.graph, model.graph.output, self.output_names)
        # An input that is an output as well has lost its name to that
        in_code = tuple(part.program.graph_signature.user_inputs)
        _name_(model.graph, model.graph.input, self.input_names or in_code)
        _name_batch_(model.graph)
        _name_layers_(model.graph, _readers(part), self._prefix)
        return model

    @property
    def layers(self) -> set[str]:
        """The layers whose weights the network reads: not those that only run in training, for example."""
        part = next(iter(self.parts.values()))
        return {layer.removeprefix(self._prefix) for layer in _readers(part).values()}

    @property
    def _prefix(self) -> str:
        return f"{self.prefix}." if self.prefix else ""


def prepared(
    masked: nn.Module,
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype,
    prefix: str = "",
    input_names: tuple[str, ...] = (),
) -> Network:
    """Fold a masked copy of the user's model, which is changed.

    Args:
        masked: The copy, in float32 on the CPU and in eval mode.
        inputs: Example inputs.
        dtype: A dtype that it will be exported in. Capturing takes most of the time, and is done once.
        prefix: The name of the user's model inside of it, if it is wrapped.
        input_names: What its inputs are called in the file; default: as in its code.
    """
    for module in masked.modules():
        if kind_of(module) is not None and weight_sources(module):
            plain_weight_(module)  # a constant, instead of the computation
    thaw_(masked)
    add_biases_(masked)
    part = _captured(masked, inputs, dtype)
    folded = fold_(masked, part)
    names = _output_names(_run(masked, inputs))
    return Network(masked, inputs, folded, input_names, names, prefix, {dtype: part})


def outputs_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output tensors of a module, in the order in which they are in a file."""
    return [value for value in pytree.tree_leaves(_run(module, inputs)) if isinstance(value, Tensor)]


def _run(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    try:
        with torch.no_grad():
            return module(*pytree.tree_map_only(Tensor, torch.clone, inputs))  # networks may write to their inputs
    except Exception as error:  # the model's own code
        raise ModelError(f"{type(module).__name__} does not run on the example: {first_line(error)}") from error


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    if dtype == torch.float32:
        return module
    copy = clone(module)
    convert_(copy, dtype)
    return copy


def _captured(module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Part:
    """The module in a dtype, captured as one graph."""
    captured = capture(_in_dtype(module, dtype), tuple(_cast(x, dtype) for x in inputs))
    if not captured.complete:
        raise ModelError(
            f"{type(module).__name__} cannot be exported as one graph: {captured.reason}; "
            f"export a module of it that takes and returns tensors, or rewrite what depends on the data"
        )
    return captured.parts[0]


def _keep_tensors_(part: Part) -> None:
    """Leave out what a captured graph returns besides tensors, such as numbers: the exporter only takes None."""
    node = part.graph.output_node()
    returned: Any = node.args[0]
    pairs = list(zip(returned, part.program.graph_signature.output_specs, strict=True))
    for value, spec in pairs:
        if not _is_tensor(value):
            spec.arg = ConstantArgument(name="", value=None)
    node.args = (tuple(value if _is_tensor(value) else None for value, _ in pairs),)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _output_names(result: Any) -> tuple[str, ...]:
    """The names of outputs: the keys of a dict, the position in a tuple, or "output".

    >>> _output_names({"out": torch.zeros(1), "aux": torch.zeros(1)}), _output_names(torch.zeros(1))
    (('out', 'aux'), ('output',))
    """
    leaves, _ = pytree.tree_flatten_with_path(result)
    named = [(".".join(_key(step) for step in path), value) for path, value in leaves if isinstance(value, Tensor)]
    return tuple(f"output_{name}" if name[:1].isdigit() else name or "output" for name, _ in named)


def _key(step: Any) -> str:
    return str(next(getattr(step, name) for name in ("key", "idx", "name") if hasattr(step, name)))


def _name_(graph: Any, values: Any, names: tuple[str, ...]) -> None:
    """Give names to the inputs or outputs of a graph, unless others have them."""
    if len(names) != len(values) or len(set(names)) != len(names):
        return
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    wanted = {value.name: name for value, name in zip(values, names, strict=True)}
    if len(wanted) == len(names) and not taken & (set(names) - wanted.keys()):
        rename_(graph, wanted)


def rename_(graph: Any, names: Mapping[str, str]) -> None:
    """Rename tensors of a graph."""
    for node in graph.node:
        for place in (node.input, node.output):
            for i, name in enumerate(place):
                place[i] = names.get(name, name)
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)


def _name_batch_(graph: Any) -> None:
    """Call the free first dimension of the inputs "batch"."""
    dims = [value.type.tensor_type.shape.dim for value in graph.input]
    free = {dim[0].dim_param for dim in dims if len(dim) and dim[0].dim_param}
    if len(free) != 1:
        return
    [symbol] = free
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_param = BATCH


def _readers(part: Part) -> dict[str, str]:
    """The layer whose weight an operation of a captured graph reads, by the operation's name."""
    found: dict[str, str] = {}
    views: dict[Node, str] = {}  # of weights, such as their transposes
    for node in part.graph.nodes:
        for source in node.all_input_nodes:
            layer = views.get(source, owner(part, source, "weight"))
            if layer is not None:
                found[node.name] = layer
                if len(node.all_input_nodes) == 1:
                    views[node] = layer
    return found


def _name_layers_(graph: Any, readers: Mapping[str, str], prefix: str) -> None:
    """Name each convolution and matrix product after its layer in the model: TensorRT's logs use these names.

    Args:
        graph: The graph. It is changed.
        readers: The layer whose weight an operation reads, by the name it had when it was captured.
        prefix: What the names of layers start with in the captured model, and not in the user's.
    """
    rename_(graph, {t.name: t.name.removeprefix(prefix) for t in graph.initializer if t.name.startswith(prefix)})
    seen: Counter[str] = Counter()
    others = {node.name for node in graph.node if node.op_type not in PRODUCTS}
    for node in graph.node:
        if node.op_type not in PRODUCTS:
            continue
        name = _layer_of(node, readers).removeprefix(prefix) or node.name
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name}.call{seen[name]}"
        node.name = f"{name}.product" if name in others else name
    _name_sums_(graph, prefix)
    for node in graph.node:  # they hold paths of the user's source code, and double the size of a small file
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for value in (*graph.value_info, *graph.input, *graph.output, *graph.initializer):
        value.ClearField("metadata_props")


def _name_sums_(graph: Any, prefix: str) -> None:
    """Name sums of computed tensors after the module that adds them: what int8 costs is said for each."""
    constants = {tensor.name for tensor in graph.initializer}
    taken = {node.name for node in graph.node}
    for node in graph.node:
        if constants.issuperset(filter(None, node.input)):  # such as a cast of a table, in float16 only
            constants.update(node.output)
        elif node.op_type == "Add" and constants.isdisjoint(node.input):
            module = _layer_of(node, {})
            first = f"{module}.".removeprefix(prefix) + "add" if module else "add"
            names = itertools.chain([first], (f"{first}_{number}" for number in itertools.count(2)))
            node.name = next(name for name in names if name not in taken)
            taken.add(node.name)


def _layer_of(node: Any, readers: Mapping[str, str]) -> str:
    """The name of the layer that a node comes from: the holder of its weight, or the module that ran it."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
    path = ["", "", *map(str, ast.literal_eval(scopes))]  # modules, then the operation
    return readers.get(path[-1]) or path[-2]


def add_metadata_(model: Any, entries: Mapping[str, str | Sequence[str]]) -> None:
    """Add entries that are read by `check_onnx`."""
    for key, value in entries.items():
        model.metadata_props.add(key=f"halve.{key}", value=value if isinstance(value, str) else json.dumps(value))
