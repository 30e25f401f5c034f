"""Capture a model's structure with torch.export: the one way, for whoever needs it.

A captured part is a graph of ATen operations with a free batch size, whose weights carry their names in the model. What
cannot be exported whole is captured in its largest exportable modules, and the rest is named with the reason.
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

from halve.errors import ModelError, listed
from halve.modules import clone, kind_of

TRACING = threading.RLock()  # torch traces by patching nn.Module for the whole process: one thread at a time
Sizes = tuple[tuple[tuple[int, int | None], ...], ...]

_CALL = "model"  # where a model stands inside of `_Called`


@dataclass(frozen=True)
class Part:
    """A captured module: `name` is its place in the model, "" for the model itself.

    `tensors` gives for each placeholder of the graph that is in the model's state dict its name there; tensors that are
    tied have one name, the first.
    """

    name: str
    program: ExportedProgram = field(repr=False)
    tensors: Mapping[str, str] = field(repr=False)
    prefix: str = field(default="", repr=False)

    @property
    def graph(self) -> torch.fx.Graph:
        graph: torch.fx.Graph = self.program.graph
        return graph

    @property
    def free_batch(self) -> bool:
        """Whether the graph holds for any number of images, as far as its inputs tell."""
        inputs = set(self.program.graph_signature.user_inputs)
        values = [node.meta.get("val") for node in self.graph.nodes if node.op == "placeholder" and node.name in inputs]
        batched = [value for value in values if isinstance(value, Tensor) and value.dim()]
        return bool(batched) and any(isinstance(value.shape[0], torch.SymInt) for value in batched)

    def sizes(self) -> "Sizes":
        """For each input that is a tensor the sizes that the graph holds for: from, to; None where there is no end."""
        held = {node.name: node.meta.get("val") for node in self.graph.nodes if node.op == "placeholder"}
        inputs = [held.get(str(name)) for name in self.program.graph_signature.user_inputs]
        return tuple(tuple(map(self._limits, x.shape)) for x in inputs if isinstance(x, Tensor))

    def _limits(self, size: Any) -> tuple[int, int | None]:
        if isinstance(size, int):
            return size, size
        limits = self.program.range_constraints.get(size.node.expr)
        least = int(limits.lower) if limits is not None else 0
        return (0 if least <= 2 else least), None  # torch.export calls everything that is not 1 "2 or more"

    def module_of(self, node: torch.fx.Node) -> str:
        """The name, in the model, of the innermost module that an operation belongs to."""
        stack = node.meta.get("nn_module_stack") or {}
        inner = [place[0] for place in stack.values()][-1] if stack else ""
        if self.prefix:
            inner = inner.removeprefix(self.prefix).removeprefix(".")
        return ".".join(filter(None, (self.name, inner)))


@dataclass(frozen=True)
class Captured:
    """What `capture` found: one part when the model could be exported whole."""

    parts: tuple[Part, ...]
    left: Mapping[str, str]  # modules with layers that are in no part, and why
    reason: str = ""  # why the model could not be exported whole

    @property
    def whole(self) -> bool:
        return len(self.parts) == 1 and not self.parts[0].name


def capture(
    model: nn.Module,
    example: Any,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    *,
    free_size: bool = False,
) -> Captured:
    """The structure of a model, as it runs in eval mode on an example.

    `example` is a tensor of images or a tuple of arguments; with `forward` it is whatever `forward(model, example)`
    takes. One image is enough: it is doubled inside, since a graph of batch 1 would hold for batch 1 only. With
    `free_size` the graph holds for images of other sizes too, where the model does. The model stays as it is.

    >>> captured = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8))
    >>> captured.whole, captured.parts[0].free_batch, sorted(captured.parts[0].tensors.values())
    (True, True, ['0.bias', '0.weight'])
    """
    copy = clone(model).eval()
    names = _names(copy)
    arguments = (example,) if forward is not None or not isinstance(example, tuple) else example
    arguments = tuple(two_images(argument) for argument in arguments)
    root = copy if forward is None else _Called(copy, forward)
    prefix = "" if forward is None else _CALL
    with TRACING, torch.no_grad(), _quiet():
        program, reason = _export(root, arguments, {}, free_size)
        if program is not None:
            return Captured((Part("", program, _tensors(program, "", prefix, names), prefix),), {})
        parts, left = _in_parts(copy, root, arguments, reason, names, free_size)
    if not parts:
        reasons = listed([f"{name or type(model).__name__}: {why}" for name, why in left.items()], most=3)
        raise ModelError(f"torch.export can capture no part of {type(model).__name__}: {reasons}")
    return Captured(tuple(parts), left, reason)


def _in_parts(
    model: nn.Module,
    root: nn.Module,
    arguments: tuple[Any, ...],
    reason: str,
    names: Mapping[int, str],
    free_size: bool,
) -> tuple[list[Part], dict[str, str]]:
    """The largest modules that can be exported on what they are given in one run of the whole model."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    with _recording(model, calls):
        try:
            root(*arguments)
        except Exception as error:  # the model's own code, on an example that may not fit it
            raise ModelError(f"{type(model).__name__} cannot run on the example: {error}") from error
    parts: list[Part] = []
    left: dict[str, str] = {}

    def descend(name: str, module: nn.Module, why: str) -> None:
        for child_name, child in module.named_children():
            path = ".".join(filter(None, (name, child_name)))
            if not any(kind_of(inner) for inner in child.modules()):
                continue
            program, reason = None, why
            if path in calls:
                program, reason = _export(child, *calls[path], free_size)
            elif kind_of(child):
                reason = "it did not run on the example"
            if program is not None:
                parts.append(Part(path, program, _tensors(program, path, "", names)))
            elif kind_of(child):
                left[path] = reason
            else:
                descend(path, child, reason)

    descend("", model, reason)
    return parts, left


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], free_size: bool
) -> tuple[ExportedProgram | None, str]:
    """The exported module, or None and why not."""

    def free(value: Any) -> dict[int, Any] | None:
        if not _is_batched(value):
            return None
        return dict.fromkeys((0, 2, 3) if free_size and value.dim() == 4 else (0,), Dim.AUTO)

    try:
        named = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        shapes = pytree.tree_map(free, named)
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False), ""
    except Exception as error:  # exporting runs the model's own code on stand-ins, which may raise anything
        if free_size:
            return _export(module, args, kwargs, free_size=False)
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {first[:160]}"


class _Called(nn.Module):
    """A model with the user's way of running it."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.add_module(_CALL, model)
        self._forward = forward

    def forward(self, batch: Any) -> Any:
        return self._forward(self.get_submodule(_CALL), batch)


def two_images(example: Any) -> Any:
    """The first two images of a batch; one image is doubled. A list of single images stays as it is."""
    if isinstance(example, list) and all(isinstance(image, Tensor) and image.dim() == 3 for image in example):
        return example
    return pytree.tree_map(_two_of, example)


def _two_of(value: Any) -> Any:
    if not _is_batched(value):
        return value
    return value[:2] if len(value) > 1 else torch.cat([value, value])


def _is_batched(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _names(model: nn.Module) -> dict[int, str]:
    """For each parameter and buffer its first state-dict name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {id(tensor): name for name, tensor in reversed(named)}


def _tensors(program: ExportedProgram, name: str, prefix: str, names: Mapping[int, str]) -> dict[str, str]:
    """Placeholder -> state-dict name in the whole model."""
    signature = program.graph_signature
    held = {**program.state_dict, **program.constants}
    result = {}
    for placeholder, own in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items():
        if own in signature.non_persistent_buffers:
            continue  # no checkpoint carries it
        tensor = held.get(own)
        inner = own.removeprefix(f"{prefix}.") if prefix else own
        result[placeholder] = names.get(id(tensor), ".".join(filter(None, (name, inner))))
    return result


@contextlib.contextmanager
def _recording(model: nn.Module, calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]) -> Iterator[None]:
    """Notes what each module is called with, the first time."""

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, (args, kwargs))

        return note

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name and not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter from printing whole graphs where it fails: the outcome says what counts."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
