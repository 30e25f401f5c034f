"""One-shot scores: pure functions of a weight and what was seen of its inputs; the higher, the more worth keeping."""

import torch
from torch import Tensor

from halve.masks.layout import Layout

SCORES = {
    "magnitude": "the weight's absolute value, what NVIDIA's Apex ASP does",
    "wanda": "the weight's absolute value times the norm of its inputs; needs data",
    "random": "no information at all: what the other scores must beat",
}
NEEDS_DATA = {"wanda"}


def magnitude(weight: Tensor) -> Tensor:
    """|w|

    >>> magnitude(torch.tensor([[-2.0, 1.0]])).tolist()
    [[2.0, 1.0]]
    """
    return weight.abs()


def wanda(weight: Tensor, layout: Layout, squares: Tensor) -> Tensor:
    """|w| ||x||, the norm taken over all inputs that the weight is multiplied with.

    `squares`: summed squares of the inputs, (input channels, *kernel).

    >>> layout = Layout("linear", (1, 4), block=4)
    >>> wanda(torch.tensor([[-2.0, 1.0, 1.0, 1.0]]), layout, torch.tensor([1.0, 9.0, 0.0, 1.0])).tolist()
    [[2.0, 3.0, 0.0, 1.0]]
    """
    norms = squares.sqrt()
    if layout.kind == "conv_transpose":
        norms = norms[:, None]
    elif layout.groups > 1:
        per_group = norms.reshape(layout.groups, 1, *weight.shape[1:])
        norms = per_group.expand(-1, layout.rows // layout.groups, *weight.shape[1:]).reshape(weight.shape)
    return weight.abs() * norms.to(weight.device)


def random(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers."""
    return torch.rand(weight.shape, generator=generator)
