"""Scores that judge each weight by itself: magnitude, Wanda and random."""

import torch
from torch import Tensor

from halve.prune.score import LayerScores, Score, ScoreInputs
from halve.prune.statistics import input_squares


def magnitude(weight: Tensor) -> Tensor:
    """|w|

    >>> magnitude(torch.tensor([[-2.0, 1.0]])).tolist()
    [[2.0, 1.0]]
    """
    return weight.abs()


def wanda(weight: Tensor, squares: Tensor) -> Tensor:
    """|w| ||x||, where x are all inputs that the weight is multiplied by.

    Args:
        weight: The weight.
        squares: For each weight, the sum of its squared inputs. Inputs that are always zero count as very small, so
            that magnitudes still decide between them.

    >>> wanda(torch.tensor([[-2.0, 1.0, 1.0, 1.0]]), torch.tensor([[1.0, 9.0, 4.0, 1.0]])).tolist()
    [[2.0, 3.0, 2.0, 1.0]]
    """
    norms = squares.sqrt().to(weight.device)
    largest = norms.max()
    return weight.abs() * norms.clamp(min=1e-6 * largest) if largest > 0 else weight.abs()


def wanda_or_magnitude(weight: Tensor, squares: Tensor | None) -> Tensor:
    """Wanda's score, or the magnitude for a layer that the data never reached."""
    return magnitude(weight) if squares is None else wanda(weight, squares)


def _magnitude(inputs: ScoreInputs) -> LayerScores:
    return LayerScores({choice.name: magnitude(inputs.weights[choice.name]) for choice in inputs.choices})


def _wanda(inputs: ScoreInputs) -> LayerScores:
    squares, images = input_squares(inputs.model, inputs.choices, inputs.data, inputs.forward, inputs.progress)
    names = [choice.name for choice in inputs.choices]
    return LayerScores({n: wanda_or_magnitude(inputs.weights[n], squares.pop(n, None)) for n in names}, images)


def _random(inputs: ScoreInputs) -> LayerScores:
    generator = torch.Generator().manual_seed(inputs.seed)
    names = [choice.name for choice in inputs.choices]
    return LayerScores({name: torch.rand(inputs.weights[name].shape, generator=generator) for name in names})


MAGNITUDE = Score("magnitude", "absolute value of the weight, as in NVIDIA's Apex ASP", _magnitude)
# A layer's outputs lose the squares of Wanda's scores; plain magnitudes did better on held-out images.
WANDA = Score("wanda", "magnitude times the norm of the inputs; needs data", _wanda, needs_data=True, search_power=2)
RANDOM = Score("random", "random numbers, the baseline for all other scores", _random)
