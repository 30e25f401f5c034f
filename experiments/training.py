"""Train a classifier from scratch, on one device or under torchrun on several; an interrupted run continues."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from halve.learn.augment import augmented
from halve.learn.distributed import Processes
from halve.learn.stream import BatchStream

WARM_UP = 0.1  # share of the steps
SMOOTHING = 0.1  # of labels
SAVE_EVERY = 30.0  # seconds, at the end of an epoch


@dataclass(frozen=True)
class Recipe:
    """How to train: SGD for networks with BatchNorm, AdamW for those with LayerNorm; `lr` is for 256 images a step."""

    epochs: int
    adam: bool
    lr: float
    weight_decay: float

    @classmethod
    def of(cls, model: nn.Module, epochs: int) -> "Recipe":
        """The usual recipe for a network."""
        if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            return cls(epochs, False, 0.1, 5e-4)
        return cls(epochs, True, 1e-3, 0.05)

    def optimizer(self, model: nn.Module, images: int) -> torch.optim.Optimizer:
        """The optimizer for steps of so many images; norms and biases do not decay."""
        flat = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        rest = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        groups = [{"params": rest, "weight_decay": self.weight_decay}, {"params": flat, "weight_decay": 0.0}]
        lr = self.lr * images / 256
        if self.adam:
            return torch.optim.AdamW(groups, lr=lr)
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)


def rate(fraction: float) -> float:
    """The learning rate after a share of the steps, relative to the highest: a line up, then half a cosine.

    >>> [round(rate(share), 2) for share in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if fraction < WARM_UP:
        return fraction / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (fraction - WARM_UP) / (1 - WARM_UP))


def train_(
    model: nn.Module,
    data: Any,
    recipe: Recipe,
    processes: Processes,
    state: Path,
    *,
    batch: int,
    seed: int = 0,
    report: Callable[[str], None] = print,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train a model in place, and leave it in eval mode; returns whether it is done.

    Args:
        model: The model, the same on all processes.
        data: Batches of (images, labels) with a length; all processes read all of them and use their share.
        recipe: How to train.
        processes: This process among those of a torchrun.
        state: File for the state after an epoch; if it exists, training continues from it. Removed at the end.
        batch: Images per batch and process.
        seed: Seed of the augmentation.
        report: Called with a line of text after each epoch.
        stop: Asked after each epoch whether to stop early; the state is saved then.
    """
    device = processes.device
    optimizer = recipe.optimizer(model, batch * processes.count)
    epoch = 0
    if processes.broadcast(state.exists()):
        saved = torch.load(state, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch = saved["epoch"]
    wrapped = processes.wrap(model)
    stream = BatchStream(data, processes.rank, processes.count)
    random = torch.Generator(device).manual_seed(1000 * seed + processes.rank + 7919 * epoch)
    steps = stream.length
    assert steps, f"the data has {steps} batches per process"
    highest = [group["lr"] for group in recipe.optimizer(model, batch * processes.count).param_groups]
    started = saved_at = time.perf_counter()
    first = epoch
    wrapped.train()
    while epoch < recipe.epochs:
        total = torch.zeros((), device=device)
        for step in range(steps):
            images, labels = (part.to(device, non_blocking=True) for part in stream.next())
            share = rate((epoch + (step + 0.5) / steps) / recipe.epochs)
            for group, lr in zip(optimizer.param_groups, highest, strict=True):
                group["lr"] = share * lr
            images = augmented(images, random, mixed=False).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(wrapped(images), labels, label_smoothing=SMOOTHING)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        epoch += 1
        stopping = processes.broadcast(stop())
        now = time.perf_counter()
        if processes.is_main:
            left = (now - started) / (epoch - first) * (recipe.epochs - epoch)
            report(f"epoch {epoch} of {recipe.epochs}, loss {float(total) / steps:.3f}, {left:.0f} s left")
            if (stopping or now - saved_at > SAVE_EVERY) and epoch < recipe.epochs:
                whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(whole, state.with_suffix(".new"))
                state.with_suffix(".new").rename(state)  # at once, or not at all
                saved_at = now
        if stopping and epoch < recipe.epochs:
            model.eval()
            return False
    model.eval()
    if processes.is_main:
        state.unlink(missing_ok=True)
    return True
