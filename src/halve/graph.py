"""Capture a model as a graph with torch.export.

A captured part is a functional graph of ATen operations: it has no side effects, and says separately whether the module
writes to its buffers or inputs. The batch size is dynamic, and weights keep their state-dict names. If a model cannot
be exported as one graph, its largest exportable modules are captured.
"""

import contextlib
import inspect
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from halve.errors import ModelError, first_line, listed
from halve.modules import clone, kind_of

TRACING_LOCK = threading.RLock()  # tracing patches nn.Module globally: only one thread may trace at a time
Sizes = tuple[tuple[tuple[int, int | None], ...], ...]  # per input and dimension: smallest and largest size (None: any)

_CALL = "model"  # the name of the model inside `_Called`
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """A captured module. `name` is its name in the model, "" for the model itself.

    `tensors` maps each placeholder that holds a parameter or persistent buffer to its state-dict name; tied tensors
    share one name, the first. `conditions` are torch.export's guards on input sizes, as Python expressions.
    """

    name: str
    program: ExportedProgram = field(repr=False)
    tensors: Mapping[str, str] = field(repr=False)
    prefix: str = field(default="", repr=False)
    conditions: tuple[str, ...] = field(default=(), repr=False)
    writes_inputs: bool = False

    @property
    def graph(self) -> torch.fx.Graph:
        graph: torch.fx.Graph = self.program.graph
        return graph

    @property
    def writes_buffers(self) -> bool:
        return bool(self.program.graph_signature.buffers_to_mutate)

    def sizes(self) -> Sizes:
        """The input sizes that the graph is valid for."""
        values = {node.name: node.meta.get("val") for node in self.graph.nodes if node.op == "placeholder"}
        inputs = [values.get(str(name)) for name in self.program.graph_signature.user_inputs]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        return tuple(tuple(self._limits(dim, size) for dim, size in enumerate(x.shape)) for x in tensors)

    def _limits(self, dim: int, size: Any) -> tuple[int, int | None]:
        if isinstance(size, int):
            return size, size
        limits = self.program.range_constraints.get(size.node.expr)
        least = int(limits.lower) if limits is not None else 0
        # torch.export excludes 1 from dynamic sizes. For batches, callers check whether the model supports it.
        return (0 if dim == 0 and least <= 2 else least), None

    def module_of(self, node: torch.fx.Node) -> str:
        """The name of the innermost module that an operation belongs to."""
        stack = node.meta.get("nn_module_stack") or {}
        inner = [place[0] for place in stack.values()][-1] if stack else ""
        if self.prefix:
            inner = inner.removeprefix(self.prefix).removeprefix(".")
        return ".".join(filter(None, (self.name, inner)))


@dataclass(frozen=True)
class Captured:
    """The result of `capture`: a single part if the model could be exported as one graph."""

    parts: tuple[Part, ...]
    uncaptured: Mapping[str, str]  # modules with layers outside of all parts, and why
    reason: str = ""  # why the model could not be exported as one graph

    @property
    def complete(self) -> bool:
        """Whether the model was captured as one graph."""
        return len(self.parts) == 1 and not self.parts[0].name


def capture(
    model: nn.Module,
    example: Any,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    any_size: bool = False,
    keep_modes: bool = False,
) -> Captured:
    """Capture a model as a graph, in eval mode. The model is not changed.

    Args:
        model: any module.
        example: a tensor of images, a list of images or a tuple of arguments; with `forward`, whatever
            `forward(model, example)` takes. A single image is repeated, since a graph captured with batch size 1 is
            only valid for that. Models that take a list are captured in parts.
        forward: runs the model on the example. Default: `model(example)`, or `model(*example)` for a tuple.
        any_size: allow other image sizes than the example's, if the model does. Capturing is slower, and the graph has
            more guards. Parts always allow other sizes, since the model may call them with any.
        keep_modes: capture with every module in the mode it is in, instead of eval mode.

    >>> captured = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8))
    >>> captured.complete, sorted(captured.parts[0].tensors.values()), captured.parts[0].sizes()
    (True, ['0.bias', '0.weight'], (((0, None), (3, 3), (8, 8), (8, 8)),))
    """
    copy = clone(model) if keep_modes else clone(model).eval()
    names = _names(copy)
    arguments = (example,) if forward is not None or not isinstance(example, tuple) else example
    arguments = tuple(two_images(argument) for argument in arguments)
    root = copy if forward is None else _Called(copy, forward)
    prefix = "" if forward is None else _CALL
    with TRACING_LOCK, torch.no_grad(), _quiet():
        found: _Exported | str = "it takes a list of images"  # a graph would be valid for as many images of their sizes
        if not any(is_list_of_images(argument) for argument in arguments):
            found = _export(root, arguments, {}, any_size)
        if not isinstance(found, str):
            return Captured((_part("", found, prefix, names),), {})
        parts, uncaptured = _in_parts(copy, root, arguments, found, names)
    if not parts:
        reasons = listed([f"{name or type(model).__name__}: {why}" for name, why in uncaptured.items()], most=3)
        raise ModelError(f"torch.export cannot capture any part of {type(model).__name__}: {reasons}")
    return Captured(tuple(parts), uncaptured, found)


def _in_parts(
    model: nn.Module, root: nn.Module, arguments: tuple[Any, ...], reason: str, names: Mapping[int, str]
) -> tuple[list[Part], dict[str, str]]:
    """Export the largest possible modules, with their arguments in one run of the model."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    with _recording(model, calls):
        try:
            root(*pytree.tree_map_only(Tensor, torch.clone, arguments))  # networks may write to their inputs
        except Exception as error:  # the model's own code, on an example that it may not support
            raise ModelError(f"{type(model).__name__} does not run on the example: {error}") from error
    parts: list[Part] = []
    uncaptured: dict[str, str] = {}

    def descend(name: str, module: nn.Module, why: str) -> None:
        for child_name, child in module.named_children():
            path = ".".join(filter(None, (name, child_name)))
            if not any(kind_of(inner) for inner in child.modules()):
                continue
            found: _Exported | str = why
            if path in calls:
                found = _export(child, *calls[path], any_size=True)
            elif kind_of(child):
                found = "it did not run on the example"
            if not isinstance(found, str):
                parts.append(_part(path, found, "", names))
            elif kind_of(child):
                uncaptured[path] = found
            else:
                descend(path, child, found)

    descend("", model, reason)
    return parts, uncaptured


@dataclass(frozen=True)
class _Exported:
    program: ExportedProgram
    conditions: tuple[str, ...]
    writes_inputs: bool


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], any_size: bool) -> _Exported | str:
    """Export a module; returns the reason if that fails."""

    def dynamic(value: Any) -> dict[int, Any] | None:
        if not _is_batched(value):
            return None
        return dict.fromkeys((0, 2, 3) if any_size and value.dim() == 4 else (0,), Dim.AUTO)

    try:
        named = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        shapes = pytree.tree_map(dynamic, named)
        program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        conditions = getattr(program, "_guards_code", None)
        if any_size and conditions is None:  # this version of torch does not expose its guards
            return _export(module, args, kwargs, any_size=False)
        _keep_casts_(program.graph)
        program = program.run_decompositions({})
        writes = _drop_input_writes_(program)
        return _Exported(program, tuple(conditions or ()), writes)
    except Exception as error:  # export runs the model's own code, which may raise anything
        if any_size and not isinstance(error, GuardOnDataDependentSymNode):
            return _export(module, args, kwargs, any_size=False)
        return first_line(error)


def _keep_casts_(graph: torch.fx.Graph) -> None:
    """Turn casts into copies. Casts to the dtype of the capture would be removed, but other dtypes need them."""
    for node in graph.nodes:
        if node.target is _ATEN.to.dtype:
            dtype = node.args[1]
        elif node.target is _ATEN.type_as.default:
            dtype = node.args[1].meta["val"].dtype
        else:
            continue
        node.target, node.args, node.kwargs = _ATEN._to_copy.default, node.args[:1], {"dtype": dtype}


def _drop_input_writes_(program: ExportedProgram) -> bool:
    """Remove writes to inputs from the outputs of the graph; returns whether there were any."""
    kept = [spec.kind != OutputKind.USER_INPUT_MUTATION for spec in program.graph_signature.output_specs]
    if all(kept):
        return False
    output = program.graph.output_node()
    output.args = (tuple(value for value, keep in zip(output.args[0], kept, strict=True) if keep),)
    specs = program.graph_signature.output_specs
    specs[:] = [spec for spec, keep in zip(specs, kept, strict=True) if keep]
    return True


def _part(name: str, exported: _Exported, prefix: str, names: Mapping[int, str]) -> Part:
    tensors = _tensors(exported.program, name, prefix, names)
    return Part(name, exported.program, tensors, prefix, exported.conditions, exported.writes_inputs)


class _Called(nn.Module):
    """A model together with the function that runs it."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.add_module(_CALL, model)
        self._forward = forward

    def forward(self, batch: Any) -> Any:
        return self._forward(self.get_submodule(_CALL), batch)


def two_images(example: Any) -> Any:
    """The first two images of a batch; a single image is repeated. A list of images beside others stays as it is."""
    if is_list_of_images(example):
        return (example * 2)[:2]
    values = example.values() if isinstance(example, Mapping) else example if isinstance(example, tuple | list) else ()
    return example if any(map(is_list_of_images, values)) else pytree.tree_map(_two_of, example)


def is_list_of_images(example: Any) -> bool:
    """Whether an input is a list of images, (channels, height, width) each."""
    return (
        isinstance(example, list)
        and bool(example)
        and all(isinstance(image, Tensor) and image.dim() == 3 for image in example)
    )


def _two_of(value: Any) -> Any:
    if not _is_batched(value):
        return value
    return value[:2] if len(value) > 1 else torch.cat([value, value])


def _is_batched(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _names(model: nn.Module) -> dict[int, str]:
    """The first state-dict name of each parameter and buffer, by id."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {id(tensor): name for name, tensor in reversed(named)}


def _tensors(program: ExportedProgram, name: str, prefix: str, names: Mapping[int, str]) -> dict[str, str]:
    """The state-dict name in the model of each placeholder."""
    signature = program.graph_signature
    held = {**program.state_dict, **program.constants}
    result = {}
    for placeholder, own in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items():
        if own in signature.non_persistent_buffers:
            continue  # not in the state dict
        tensor = held.get(own)
        inner = own.removeprefix(f"{prefix}.") if prefix else own
        result[placeholder] = names.get(id(tensor), ".".join(filter(None, (name, inner))))
    return result


@contextlib.contextmanager
def _recording(model: nn.Module, calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]) -> Iterator[None]:
    """Record the arguments of each module's first call."""

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, (args, kwargs))

        return note

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name and not isinstance(module, torch.jit.ScriptModule)  # does not support hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export, which logs graphs when it fails."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
