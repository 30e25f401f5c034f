"""Partial capture: compile the largest capturable modules of a network that cannot be captured as one graph.

The network's own code calls these modules. Calls that satisfy the guards of a module's graph run the graph; all other
calls fall back to the original module.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.engine.capture.equivalence import agree
from halve.engine.capture.guards import Guards
from halve.engine.capture.purity import impurity
from halve.engine.fuse import fuse
from halve.engine.recorded import shapes_of
from halve.errors import first_line
from halve.graph import Part

_MAX_SHAPES = 4096  # remembered per part


def around_parts(dtype: torch.dtype) -> torch.dtype:
    """What the code between the parts of a detector computes in: coordinates of boxes need single precision.

    >>> around_parts(torch.float16), around_parts(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


class CapturedPart(nn.Module):
    """A module of the network with its graph. `eager_calls` says why calls fell back to eager, if any did."""

    def __init__(self, part: Part, graph: GraphModule, module: nn.Module) -> None:
        super().__init__()
        self.graph, self.module = graph, module
        self.guards = Guards.of(part, module.forward)
        leaves, self.structure = pytree.tree_flatten(part.program.example_inputs)
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.eager_calls: str | None = None
        self.dtype: torch.dtype | None = None  # what the graph computes in, if the code around it does not
        self._known: dict[Any, str | None] = {}  # by shapes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (why := self.misfit(args, kwargs)) is not None:
            self.eager_calls = why
            return self.module(*args, **kwargs)
        if self.dtype is None:
            return self.graph(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: _cast(x, self.dtype), (args, kwargs))
        return pytree.tree_map_only(Tensor, lambda y: _cast(y, around_parts(y.dtype)), self.graph(*args, **kwargs))

    def exclude_single_images(self) -> None:
        """Fall back to eager for batch size 1 from now on."""
        self.guards, self._known = self.guards.without_single_images(), {}

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the graph is not valid for a call; None if it is."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self.structure:
            return "other arguments"
        for leaf, constant in zip(leaves, self.constants, strict=True):
            if not isinstance(leaf, Tensor) and (type(leaf) is not type(constant) or leaf != constant):
                return f"{leaf!r} instead of {constant!r}"
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if len(tensors) != len(self.guards.sizes):
            return "other arguments"
        known, shapes = self._known, shapes_of(tensors)
        if shapes not in known:
            arguments = inspect.signature(self.module.forward).bind(*args, **kwargs).arguments
            broken = self.guards.broken_by(tensors, arguments)
            why = None if broken is None else f"inputs that are not {broken}"
            known = {**(known if len(known) < _MAX_SHAPES else {}), shapes: why}
            self._known = known  # replaced, not mutated: other threads may read it
        return known[shapes]


def captured_parts(
    model: nn.Module, parts: tuple[Part, ...], inputs: tuple[Any, ...]
) -> tuple[dict[str, CapturedPart], dict[str, str]]:
    """Capture the parts that match their modules in one run of the model; returns them, and why the others fail.

    Every call in that run is compared, since code may change a module's state between calls.
    """
    found: dict[str, CapturedPart] = {}
    refused: dict[str, str] = {}
    for part in parts:
        if (why := impurity(part)) is not None:
            refused[part.name] = f"falls back to eager: {why}"
        else:
            found[part.name] = CapturedPart(part, fuse(part), model.get_submodule(part.name))
    comparing = False

    def compare(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal comparing
            captured = found[name]
            if comparing or name in refused or captured.misfit(args, kwargs) is not None:
                return
            comparing = True  # `agree` runs the module again
            try:
                single = _single_image(args, kwargs)
                if captured.misfit(*single) is None and not agree(captured.graph, module, *single):
                    captured.exclude_single_images()
                if captured.misfit(args, kwargs) is None and not agree(captured.graph, module, args, kwargs):
                    refused[name] = "falls back to eager: its graph does not match the module in this network"
            finally:
                comparing = False

        return hook

    handles = [
        module.register_forward_hook(compare(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name in found
    ]
    try:
        model(*pytree.tree_map_only(Tensor, torch.clone, inputs))
    finally:
        for handle in handles:
            handle.remove()
    taken = {name: part for name, part in found.items() if name not in refused}
    if (why := _runs_around(model, taken, inputs)) is not None:
        why = f"falls back to eager: the code around it needs the original module ({why})"
        return {}, {**refused, **dict.fromkeys(taken, why)}
    return taken, refused


def _runs_around(model: nn.Module, parts: Mapping[str, CapturedPart], inputs: tuple[Any, ...]) -> str | None:
    """Why the model's code does not run with the captured parts; None if it does."""
    replace_parts_(model, parts)
    try:
        model(*pytree.tree_map_only(Tensor, torch.clone, inputs))
    except Exception as error:  # the model's own code
        return first_line(error)
    finally:
        for name, part in parts.items():
            model.set_submodule(name, part.module)
            part.eager_calls = None
    return None


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _single_image(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    single: tuple[tuple[Any, ...], dict[str, Any]]
    single = pytree.tree_map_only(Tensor, lambda x: x[:1] if x.dim() else x, (args, kwargs))
    return single


def replace_parts_(model: nn.Module, parts: Mapping[str, CapturedPart]) -> None:
    """Replace modules by their captured parts."""
    for name, part in parts.items():
        model.set_submodule(name, part)
