"""Data and a small network: scikit-learn's 1,797 handwritten digits of 8x8 pixels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from halve.errors import DataError, SourceError
from halve.sources.small_resnet import SmallResNet, train_

_TEST = 500


def digits(split: str) -> TensorDataset:
    """The 'train' (1,297) or 'test' (500) digits as (1, 8, 8) tensors with labels."""
    if split not in ("train", "test"):
        raise DataError(f"unknown split digits:{split}; use digits:train or digits:test")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SourceError("digits needs scikit-learn: pip install 'halve[digits]'") from error
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[:_TEST] if split == "test" else order[_TEST:]
    return TensorDataset(images[chosen], labels[chosen])


class DigitsResNet(SmallResNet):
    """A residual network of six blocks for 8x8 digits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(10, width)


def train_digits(epochs: int = 12, seed: int = 0, progress: Any = None) -> DigitsResNet:
    """Train a DigitsResNet from scratch, in a few seconds on a CPU."""
    images, labels = digits("train").tensors
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsResNet()
        train_(model, images, labels, epochs=epochs, batch=64, weight_decay=5e-4, augment=_shifted, progress=progress)
    return model


def _shifted(images: Tensor) -> Tensor:
    """The images, shifted together by at most one pixel."""
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    down, right = torch.randint(0, 3, (2,)).tolist()
    return padded[:, :, down : down + 8, right : right + 8]
