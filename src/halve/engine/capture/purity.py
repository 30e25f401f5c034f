"""What a network holds beside its weights: buffers that change as it runs, settings of parts, numbers of any type."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.engine.capture.alias import origin, written
from halve.engine.capture.partial import CapturedPart
from halve.engine.layer import Layer
from halve.graph import Part

_BY_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)


def unfit(part: Part) -> str | None:
    """Why a captured part has to run as it was: it writes to what it holds, or looks at how its numbers lie in memory.

    >>> from halve.graph import capture
    >>> class Counting(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("calls", torch.zeros(()))
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x * self.calls
    >>> unfit(capture(Counting(), torch.zeros(2, 3)).parts[0])
    'it changes its own buffers when it runs'
    """
    given = set(part.program.graph_signature.user_inputs)
    places = {origin(value) for node in part.graph.nodes for value in written(node)}
    if any(place.op == "placeholder" and place.name not in given for place in places):
        return "it changes its own buffers when it runs"
    if any(node.target in _BY_STRIDES for node in part.graph.nodes):
        return "it reads memory by strides, which are others when images lie channels last"
    return None


@contextlib.contextmanager
def unchanged(body: nn.Module) -> Iterator[dict[str, bool]]:
    """What runs inside leaves no trace in buffers that the network's own code may write to; says whether it would."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in body.modules()
        if not isinstance(module, Layer | GraphModule)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    found = {"changed": False}
    try:
        yield found
    finally:
        for module, name, buffer, value in before:
            same = module._buffers[name] is buffer and torch.equal(_bits(buffer), _bits(value))
            if not same:
                found["changed"] = True
                module._buffers[name] = buffer.copy_(value)


def _bits(x: Tensor) -> Tensor:
    """A NaN is itself, for once."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def try_(body: nn.Module, inputs: tuple[Any, ...], left: dict[str, str]) -> bool:
    """Run a network with its captured parts on trial, and put modules back whose graphs do not serve; why is in `left`.

    True where the network changes itself when it runs.
    """
    parts = {name: module for name, module in body.named_modules() if isinstance(module, CapturedPart)}
    why = "runs as it was: its graph gives something else where the network calls it"
    with unchanged(body) as found:
        for part in parts.values():
            part.on_trial = True
        try:
            body(*(x.clone() if isinstance(x, Tensor) else x for x in inputs))
        except Exception as error:  # code that looks at what it calls; what does not run at all is found out later
            first = (str(error).splitlines() or [type(error).__name__])[0]
            why = f"runs as it was: the network does not run around its graph ({first[:100]})"
            for part in parts.values():
                part.refused = True
    for name, part in parts.items():
        part.on_trial = False
        if part.refused:
            body.set_submodule(name, part.module)
            left[name] = why
    return found["changed"]


def convert_(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """To a type, real numbers alone; biases that are added in single precision stay exact."""
    exact = [(layer, layer.bias32) for layer in module.modules() if isinstance(layer, Layer)]
    module._apply(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype))
    for layer, bias in exact:
        layer.bias32 = bias
