"""What tells learning runs apart: a saved state can only be resumed by a run with the same identity."""

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.learn.batch_parts import images_in, part_of
from halve.learn.held_back import LEAST, Split
from halve.learn.stream import BatchStream
from halve.masks.fingerprint import digest
from halve.select.select import Choice

_DIGITS = 16  # of digests: they tell mistakes apart, not attacks


def identity_of_model(model: nn.Module) -> dict[str, Any]:
    """Digests of all tensors of a model by name, and of what it prints as.

    >>> one, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.GELU())
    >>> other.load_state_dict(one.state_dict())
    <All keys matched successfully>
    >>> mine, theirs = identity_of_model(one), identity_of_model(other)
    >>> [name for name in mine if mine[name] != theirs[name]]
    ['architecture']
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # addresses of functions
    counters = ".num_batches_tracked"  # BatchNorm does not run in training mode
    digests = {name: digest(tensor)[:_DIGITS] for name, tensor in tensors if not name.endswith(counters)}
    return {"architecture": hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]} | digests


def identity_of_layers(choices: Iterable[Choice]) -> dict[str, Any]:
    """Pattern and layout of each masked layer."""
    return {choice.name: _layout_of(choice) for choice in choices}


def _layout_of(choice: Choice) -> list[Any]:
    assert choice.layout is not None
    layout = choice.layout
    order = layout.channel_order and hashlib.sha256(repr(layout.channel_order).encode()).hexdigest()[:_DIGITS]
    return [str(choice.pattern), layout.order, layout.pad, list(layout.shape), order]


def identity_of_data(split: Split, stream: BatchStream, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is certain to be the same whenever the data is, and what may differ if it is shuffled or transformed at
    random. Nothing is known of an iterator before it is read.

    Args:
        split: The data and the images held back from it.
        stream: The batches to learn from.
        seed: Seed of random transforms.
    """
    if split.kind == "iterator":
        return {}, {}
    first = stream.peek()
    size = {"batch_size": images_in(first)}
    if split.kind == "stream":
        return {"held_back": split.images}, size | {"images": _digest_of(lambda: part_of(first, 0, LEAST), seed)}
    certain = {"batches": stream.length, "held_back": split.images} | size
    images = {"images": _digest_of(split.sample, seed)}
    return (certain | images, {}) if split.kind == "list" else (certain, images)


def _digest_of(sample: Callable[[], Any], seed: int) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        leaves = pytree.tree_leaves(sample())
    tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
    return hashlib.sha256("".join(map(digest, tensors)).encode()).hexdigest()[:_DIGITS]
