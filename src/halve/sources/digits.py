"""Data and a small network for the demo: scikit-learn's 1,797 handwritten digits of 8x8 pixels."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from halve.errors import DataError, SourceError

_TEST = 500


def digits(split: str) -> TensorDataset:
    """The 'train' (1,297) or 'test' (500) digits as (1, 8, 8) tensors with labels."""
    if split not in ("train", "test"):
        raise DataError(f"unknown split digits:{split}; use digits:train or digits:test")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SourceError("digits needs scikit-learn: pip install 'halve[demo]'") from error
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[:_TEST] if split == "test" else order[_TEST:]
    return TensorDataset(images[chosen], labels[chosen])


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


class DigitsResNet(nn.Module):
    """A residual network of six blocks for 8x8 digits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def train_digits(epochs: int = 12, seed: int = 0, progress: Any = None) -> DigitsResNet:
    """Train a DigitsResNet from scratch, in a few seconds on a CPU."""
    images, labels = digits("train").tensors
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsResNet().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        steps = epochs * (len(images) // 64)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
        rounds: Iterable[int] = range(epochs)
        for _ in progress(rounds, "training") if progress else rounds:
            for batch in torch.split(torch.randperm(len(images)), 64)[: len(images) // 64]:
                loss = F.cross_entropy(model(_shifted(images[batch])), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def _shifted(images: Tensor) -> Tensor:
    """The images, shifted together by at most one pixel."""
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    down, right = torch.randint(0, 3, (2,)).tolist()
    return padded[:, :, down : down + 8, right : right + 8]
