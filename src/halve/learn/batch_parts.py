"""Parts of a batch: how many images it holds, and some of them together with what belongs to them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from halve.batches import check_readable, images_of
from halve.errors import DataError


def images_in(batch: Any) -> int:
    """Number of images in a batch; 1 if that cannot be told.

    >>> import torch
    >>> images_in((torch.zeros(6, 3, 8, 8), torch.zeros(6))), images_in({"image": torch.zeros(4, 3, 8, 8)})
    (6, 4)
    """
    return length_of(batch) or 1


def length_of(batch: Any) -> int:
    """Number of images in a batch; 0 if that cannot be told."""
    if _is_image_list(batch):
        return len(batch)
    try:
        return len(images_of(batch))
    except DataError:
        return _length_of_first_part(batch)


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Images `start` to `stop` of a batch, with their labels. What cannot be cut is returned whole.

    >>> import torch
    >>> images, labels = part_of((torch.zeros(6, 3, 8, 8), torch.arange(6)), 4, 6)
    >>> images.shape, labels
    (torch.Size([2, 3, 8, 8]), tensor([4, 5]))
    """
    size = length_of(batch)
    return batch if not size or (start, stop) == (0, size) else _cut(batch, size, slice(start, stop), outermost=True)


def pieces_of(batches: Iterable[Any], first: int, most: int) -> Iterator[Any]:
    """The batches in pieces that grow from `first` to `most` images, each at most twice as large as the one before.

    >>> import torch
    >>> [len(piece) for piece in pieces_of([torch.zeros(24, 8), torch.zeros(40, 8)], first=4, most=16)]
    [4, 8, 12, 16, 16, 8]
    """
    size = first
    for batch in batches:
        start, images = 0, images_in(batch)
        while start < images:
            stop = min(start + size, images)
            yield part_of(batch, start, stop)
            start, size = stop, min(2 * size, most)


def _cut(batch: Any, size: int, where: slice, outermost: bool = False) -> Any:
    if isinstance(batch, Mapping):
        return {key: _cut(value, size, where) for key, value in batch.items()}
    container = outermost and isinstance(batch, tuple | list) and not _is_image_list(batch)  # of images and labels
    if not container and _is_sequence(batch) and len(batch) == size:
        return batch[where]
    if isinstance(batch, tuple | list):
        items = [_cut(item, size, where) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _length_of_first_part(batch: Any) -> int:
    """The same for a batch that only the user's `forward` understands."""
    if isinstance(batch, tuple | list) and batch:
        return len(batch) if _is_image_list(batch) else _length_of_first_part(batch[0])
    parts = batch.values() if isinstance(batch, Mapping) else [batch]
    first = next((part for part in parts if _is_sequence(part)), ())
    if isinstance(first, Tensor):
        check_readable(first)
    return len(first)


def _is_sequence(part: Any) -> bool:
    return isinstance(part, list) or (isinstance(part, Tensor | np.ndarray) and part.ndim > 0)


def _is_image_list(batch: Any) -> bool:
    """Whether a batch is a list of images, (channels, height, width) each, as detectors take them."""
    if not isinstance(batch, list) or not all(isinstance(image, Tensor) and image.dim() == 3 for image in batch):
        return False
    return {len(image) for image in batch} in ({1}, {3}, {4})
