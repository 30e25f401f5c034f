"""A part of a network that was captured by itself, beside the module that it was captured from.

The network's own code calls it, as it likes: several times, with other arguments than the first time, or reaching for
what is inside of it. The graph runs the calls that it holds for, the module all others.
"""

import inspect
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.engine.capture.equivalence import agree, tried
from halve.engine.capture.guards import Guards, misfit
from halve.engine.recorded import shapes_of
from halve.graph import Part

_MOST_SHAPES = 4096  # that are remembered
_OWN = (
    "graph",
    "module",
    "sizes",
    "guards",
    "structure",
    "constants",
    "other",
    "on_trial",
    "refused",
    "_known",
    "training",
)


class CapturedPart(nn.Module):
    """`other` says what was different in calls that the graph did not hold for, the last of them.

    On trial, calls run the module as well; where the graph gives something else it is `refused`. Code may have set the
    module up otherwise for the call, in a way that no argument shows.
    """

    def __init__(self, part: Part, graph: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.graph, self.module = graph, module
        args, kwargs = part.program.example_inputs
        guards = Guards.of(part.program, module.forward)
        self.sizes, self.guards = tried(graph, module, part.sizes(), guards, args, kwargs)
        leaves, self.structure = pytree.tree_flatten(part.program.example_inputs)
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.other: str | None = None
        self.on_trial = self.refused = False
        self._known: dict[Any, str | None] = {}  # what was found of shapes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (why := self._unfit(args, kwargs)) is not None:
            self.other = why
            return self.module(*args, **kwargs)
        if self.on_trial:
            self.refused |= not agree(self.graph, self.module, args, kwargs)
            return self.module(*args, **kwargs)
        return self.graph(*args, **kwargs)

    def _unfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self.structure:
            return "other arguments"
        for leaf, constant in zip(leaves, self.constants, strict=True):
            if not isinstance(leaf, Tensor) and (type(leaf) is not type(constant) or leaf != constant):
                return f"{leaf!r} for {constant!r}"
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        known, shapes = self._known, shapes_of(tensors)
        if shapes in known:
            return known[shapes]
        given = inspect.signature(self.module.forward).bind(*args, **kwargs).arguments
        why = self._of_other_shapes(tensors) or self.guards.unmet(given)
        self._known = {**(known if len(known) < _MOST_SHAPES else {}), shapes: why}  # anew: others may be reading
        return why

    def _of_other_shapes(self, tensors: tuple[Tensor, ...]) -> str | None:
        if len(tensors) != len(self.sizes):
            return "other arguments"
        return next((why for x, limits in zip(tensors, self.sizes, strict=True) if (why := misfit(x, limits))), None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name in _OWN or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)  # a setting of the module, made by code that does not know of its graph

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]
