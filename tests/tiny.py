"""A small network and data for it: a learning step takes a millisecond or two."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve.learn.reporting import Report


def convnet(seed: int = 0) -> nn.Sequential:
    """Two masked convolutions ("0", "3"), a masked Linear ("8") and a head; BatchNorm with random statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 5),
        )
        for norm in (model[1], model[4]):
            nn.init.uniform_(norm.running_mean, -0.2, 0.2)
            nn.init.uniform_(norm.running_var, 0.1, 0.5)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model.eval()


def images(count: int = 24, seed: int = 1) -> Tensor:
    """8x8 images with four channels."""
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(count: int = 24, classes: int = 5) -> Tensor:
    """Labels for these images."""
    return torch.arange(count) % classes


def loader(count: int = 24, batch: int = 6, seed: int = 0) -> DataLoader[tuple[Tensor, Tensor]]:
    """Shuffled batches with labels; a new loader with the same seed yields the same order."""
    data = TensorDataset(images(count), labels(count))
    return DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(seed))


def learn(model: nn.Module, data: Any, **options: Any) -> halve.MaskSet:
    """`halve.learn` without what takes longer here than learning itself: the search for channel orders, and the
    comparison with one-shot masks."""
    return halve.learn(model, data, **{"permute": False, "validation": False} | options)


def interrupting(step: int) -> Callable[[Any], None]:
    """A report that presses Ctrl-C after this step."""

    def report(event: Any) -> None:
        if isinstance(event, Report) and event.step == step:
            raise KeyboardInterrupt

    return report


def costly():
    """Four layers whose masks change many predictions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(16, 6)).eval()
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight *= 1.6
    return model
