"""Data and a network for the demo: the letters A to Z in 24x24 pixels, rotated, over clutter and noise.

They are drawn from strokes, the same ones for the same seed, so that the demo needs no download.
"""

import itertools
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from halve.errors import DataError
from halve.sources.small_resnet import SmallResNet, train_

SIZE = 24
IMAGES = {"train": 32_768, "test": 4_096}
_CLUTTER = 4  # strokes that belong to no letter
_ROTATION = math.radians(25)
_NOISE = 0.08
_AT_ONCE = 128  # images drawn together, so that they stay in the cache
# Lines through points of a grid: column 0 to 4 and row 0 to 6, from the upper left.
_LINES = {
    "A": ["06 20 46", "14 34"],
    "B": ["00 06 36 45 44 33 03", "00 30 41 42 33"],
    "C": ["41 30 10 01 05 16 36 45"],
    "D": ["00 06 26 44 42 20 00"],
    "E": ["40 00 06 46", "03 33"],
    "F": ["40 00 06", "03 33"],
    "G": ["41 30 10 01 05 16 36 45 43 23"],
    "H": ["00 06", "40 46", "03 43"],
    "I": ["20 26", "10 30", "16 36"],
    "J": ["40 45 36 16 05"],
    "K": ["00 06", "40 03 46"],
    "L": ["00 06 46"],
    "M": ["06 00 23 40 46"],
    "N": ["06 00 46 40"],
    "O": ["10 30 41 45 36 16 05 01 10"],
    "P": ["06 00 30 41 42 33 03"],
    "Q": ["10 30 41 45 36 16 05 01 10", "24 46"],
    "R": ["06 00 30 41 42 33 03", "23 46"],
    "S": ["41 30 10 01 02 13 33 44 45 36 16 05"],
    "T": ["00 40", "20 26"],
    "U": ["00 05 16 36 45 40"],
    "V": ["00 26 40"],
    "W": ["00 16 23 36 40"],
    "X": ["00 46", "40 06"],
    "Y": ["00 23 40", "23 26"],
    "Z": ["00 40 06 46"],
}
NAMES = tuple(_LINES)


class LettersResNet(SmallResNet):
    """A residual network of 45,000 weights for the letters: small, so that every weight counts."""

    def __init__(self) -> None:
        super().__init__(len(NAMES), width=8, stride=2)


def train_letters(epochs: int = 5, seed: int = 0, progress: Any = None) -> LettersResNet:
    """Train a LettersResNet from scratch, in less than a minute on two cores."""
    images, labels = letters("train").tensors
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LettersResNet()
        train_(model, images, labels, epochs=epochs, batch=128, weight_decay=0.0, progress=progress)
    return model


@cache
def letters(split: str) -> TensorDataset:
    """The 'train' or 'test' letters as (1, 24, 24) tensors with labels."""
    if split not in IMAGES:
        raise DataError(f"unknown split letters:{split}; use letters:train or letters:test")
    generator = torch.Generator().manual_seed(list(IMAGES).index(split))
    labels = torch.randint(len(NAMES), (IMAGES[split],), generator=generator)
    return TensorDataset(torch.cat([_drawn(part, generator) for part in labels.split(_AT_ONCE)]), labels)


def _drawn(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw letters, each with its own shape, place, width, brightness, clutter, background and noise."""
    count = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    angle, size = uniform(-_ROTATION, _ROTATION), uniform(0.65, 1.05)
    width, slant = uniform(0.8, 1.2), uniform(-0.3, 0.3)
    across = torch.stack([width * angle.cos(), slant * angle.cos() - angle.sin()], 1)
    down = torch.stack([width * angle.sin(), slant * angle.sin() + angle.cos()], 1)
    transform = size[:, None, None] * torch.stack([across, down], 1)
    letter = _strokes()[labels] @ transform.mT[:, None] + uniform(-0.25, 0.25, 1, 1, 2)
    start = uniform(-1, 1, _CLUTTER, 1, 2)
    clutter = torch.cat([start, start + uniform(-0.7, 0.7, _CLUTTER, 1, 2)], 2)

    ink = _ink(letter, uniform(0.05, 0.12, 1)) * uniform(0.55, 1, 1)
    ink = ink.maximum(_ink(clutter, uniform(0.04, 0.08, 1)) * uniform(0.4, 1, 1))
    shade = F.interpolate(uniform(0, 0.6, 1, 4, 4), size=SIZE, mode="bicubic", align_corners=False).flatten(1)
    noise = _NOISE * torch.randn(count, SIZE * SIZE, generator=generator)
    return ((shade * (1 - ink) + ink + noise - 0.35) / 0.4).reshape(count, 1, SIZE, SIZE)


def _ink(strokes: Tensor, width: Tensor) -> Tensor:
    """Draw strokes, (images, strokes, ends, xy), of a width as (images, pixels) from 0 to 1."""
    side = torch.linspace(-1, 1, SIZE)
    x, y = side.repeat(SIZE), side.repeat_interleave(SIZE)
    (from_x, from_y), (to_x, to_y) = (strokes[:, :, end].unsqueeze(-1).unbind(2) for end in (0, 1))
    along_x, along_y = to_x - from_x, to_y - from_y
    x, y = x - from_x, y - from_y
    share = (x * along_x + y * along_y) / (along_x.square() + along_y.square()).clamp(min=1e-6)
    share = share.clamp(0, 1)  # of the stroke, to the point that is nearest
    squares = (x - share * along_x).square() + (y - share * along_y).square()
    return ((width - squares.amin(1).sqrt()) / 0.05 + 0.5).clamp(0, 1)


@cache
def _strokes() -> Tensor:
    """The strokes of all letters, (letters, strokes, ends, xy); short lists are filled up by their last stroke."""
    found = []
    for lines in _LINES.values():
        points = [[(int(at[0]) / 4 - 0.5, 1.4 * (int(at[1]) / 6 - 0.5)) for at in line.split()] for line in lines]
        found.append([stroke for line in points for stroke in itertools.pairwise(line)])
    most = max(map(len, found))
    return torch.tensor([strokes + strokes[-1:] * (most - len(strokes)) for strokes in found])
