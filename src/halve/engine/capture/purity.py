"""Side effects: a graph may only replace code that does not change buffers or inputs."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.engine.layer import Layer
from halve.graph import Part

_BY_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)


def impurity(part: Part) -> str | None:
    """Why a captured part must run eagerly; None if its graph may replace it.

    >>> from halve.graph import capture
    >>> class Counting(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("calls", torch.zeros(()))
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x * self.calls
    >>> impurity(capture(Counting(), torch.zeros(2, 3)).parts[0])
    'it changes its buffers when it runs'
    """
    if part.writes_buffers:
        return "it changes its buffers when it runs"
    if part.name and part.writes_inputs:
        return "it changes its inputs in place, which the code around it may read"
    if any(node.target in _BY_STRIDES for node in part.graph.nodes):
        return "it uses as_strided, whose strides are different for channels last"
    return None


class Changes:
    """Whether buffers changed while `preserved_buffers` was active."""

    found = False


@contextlib.contextmanager
def preserved_buffers(body: nn.Module) -> Iterator[Changes]:
    """Restore the buffers that the network's own code may write to, on exit."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in body.modules()
        if not isinstance(module, Layer | GraphModule)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    changes = Changes()
    try:
        yield changes
    finally:
        for module, name, buffer, value in before:
            same = module._buffers[name] is buffer and torch.equal(_bits(buffer), _bits(value))
            if not same:
                changes.found = True
                module._buffers[name] = buffer.copy_(value)


def _bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN compares equal to itself."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
