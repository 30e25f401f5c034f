"""Captured networks with their channels in random orders, which must leave their function as it is."""

import torch
from torch import nn

from halve.batches import main_output
from halve.graph import capture
from halve.masks.moves import move_
from halve.modules import clone, kind_of
from halve.permute.permute import moves_of
from halve.permute.trace.channels import Channels
from tests import families


def moved(model, captured, example):
    """(largest relative difference after a random order of every free axis, layers whose input moves, channels)."""
    channels = Channels(captured)
    axes = {id(s.axis): s.axis for _, spans in channels.items() for s in spans if s.axis.pinned is None}
    generator = torch.Generator().manual_seed(1)
    orders = {key: tuple(torch.randperm(axis.size, generator=generator).tolist()) for key, axis in axes.items()}
    copy = clone(model)
    move_(copy, moves_of(channels, orders))
    with torch.no_grad():
        dense, other = main_output(model(example)), main_output(copy(example))
    assert float(dense.abs().max()) > 0
    layers = [name for name, module in model.named_modules() if kind_of(module)]
    free = {n for n in layers if any(s.axis.pinned is None for s in channels.along(f"{n}.weight", 1) or ())}
    return float((dense - other).abs().max() / dense.abs().max()), free, channels


def shuffled(model, example):
    """(largest relative difference after a random order of every free axis, layers whose input moves, channels)."""
    return moved(model, capture(model, example), example)


def lively(model):
    """A model with random numbers, in double precision."""
    return families.lively(model).double()


def images(size, channels=4):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Odd(nn.Module):
    """A network of one operation between two convolutions of 8 channels."""

    def __init__(self, middle, made=8, **parts):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(made, 4, 1)
        self.parts = nn.ModuleDict(parts)
        self.gain = nn.Parameter(torch.rand(8, 1, 1))
        self.table = nn.Parameter(torch.rand(1, 8, 6, 1))
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))
