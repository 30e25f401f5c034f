"""One-shot scores: pure functions of a weight and what was seen of its inputs; the higher, the more worth keeping."""

import torch
from torch import Tensor

SCORES = {
    "magnitude": "the weight's absolute value, what NVIDIA's Apex ASP does",
    "wanda": "the weight's absolute value times the norm of its inputs; needs data",
    "reconstruct": "whatever changes the layer's outputs least, blocks weighed against each other; needs data",
    "random": "no information at all: what the other scores must beat",
}
NEEDS_DATA = {"wanda", "reconstruct"}
WHOLE_MASKS = {"reconstruct"}  # give 1 for kept and 0 for the rest, not a grade for each weight


def magnitude(weight: Tensor) -> Tensor:
    """|w|

    >>> magnitude(torch.tensor([[-2.0, 1.0]])).tolist()
    [[2.0, 1.0]]
    """
    return weight.abs()


def wanda(weight: Tensor, squares: Tensor) -> Tensor:
    """|w| ||x||, the norm taken over all inputs that the weight is multiplied with.

    `squares`: for each weight the summed squares of its inputs. Inputs that are always zero still leave the magnitudes
    to decide among themselves.

    >>> wanda(torch.tensor([[-2.0, 1.0, 1.0, 1.0]]), torch.tensor([[1.0, 9.0, 4.0, 1.0]])).tolist()
    [[2.0, 3.0, 2.0, 1.0]]
    """
    norms = squares.sqrt().to(weight.device)
    largest = norms.max()
    return weight.abs() * norms.clamp(min=1e-6 * largest) if largest > 0 else weight.abs()


def random(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers."""
    return torch.rand(weight.shape, generator=generator)
