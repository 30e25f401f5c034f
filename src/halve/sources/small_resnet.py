"""A small residual network for small pictures, and how to train it in seconds on a CPU."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions with a residual connection."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual network of six blocks for pictures with one channel."""

    def __init__(self, classes: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def train_(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch: int,
    weight_decay: float,
    augment: Callable[[Tensor], Tensor] | None = None,
    progress: Any = None,
) -> None:
    """Train a model from scratch with SGD, and leave it in eval mode. Draws from the global random numbers.

    Args:
        model: The model, which is trained in place.
        images: All images.
        labels: Their classes.
        epochs: Passes over the images.
        batch: Images per step.
        weight_decay: Weight decay of SGD.
        augment: Changes the images of a batch (default: they stay).
        progress: Wraps the loop over epochs.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay, nesterov=True)
    steps = len(images) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * steps)
    rounds: Iterable[int] = range(epochs)
    for _ in progress(rounds, "training") if progress else rounds:
        for index in torch.split(torch.randperm(len(images)), batch)[:steps]:
            chosen = images[index] if augment is None else augment(images[index])
            loss = F.cross_entropy(model(chosen), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
