"""Batches: where their images and labels are, and how to run a model on one.

A batch is a tensor of images, a list of images of any sizes, a tuple or list that starts with either and with labels,
or a dict with common keys (also in a list of one, as DALI yields it). Lists of images are passed on as lists, which is
what torchvision's detectors take. A user's `forward(model, batch)` handles anything else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from halve.errors import DataError, ModelError, listed
from halve.progress import track

T = TypeVar("T")
Forward = Callable[[nn.Module, Any], Any]
Images = Tensor | list[Tensor]  # (batch, ...), or one tensor (channels, height, width) per image
# True shows a line in terminals and notebooks. A function is called with an iterable and a description and yields the
# same items: rich.progress.track and tqdm.tqdm both qualify.
Progress = bool | Callable[[Iterable[Any], str], Iterable[Any]]

_INPUTS = ("image", "images", "pixel_values", "input", "inputs", "data", "x", "img")
_LABELS = ("label", "labels", "target", "targets", "cls", "y")
_OUTPUTS = ("logits", "out", "output", "outputs", "pred", "predictions")
_SPLIT = 64
_CHANNELS = (1, 3, 4)  # of images in a list without labels: other tensors are sequences (batch, channels, length)


def as_batches(data: Any) -> Iterable[Any]:
    """The data as an iterable of batches. A single tensor is split into batches of 64.

    >>> [len(batch) for batch in as_batches(torch.zeros(100, 3, 8, 8))]
    [64, 36]
    """
    if isinstance(data, Tensor):
        check_readable(data)
        return torch.split(data, _SPLIT)
    if not isinstance(data, Iterable):
        raise DataError(f"data must be an iterable of batches, such as a DataLoader; got {type(data).__name__}")
    return data


def reiterable(data: Any) -> Any:
    """The data in a form that can be iterated over more than once: an iterator becomes a list."""
    return list(data) if isinstance(data, Iterator) else data


def peeked(data: Any) -> tuple[Any, Any]:
    """Batches to look at before the data is used, and the data: an iterator can only be looked at for one batch."""
    if not isinstance(data, Iterator):
        return data, data
    first = next(iterate(data))
    return [first], chain([first], data)


def tracked(items: Iterable[T], progress: Progress | None, what: str) -> Iterable[T]:
    """The items, with a progress display if there is one."""
    if callable(progress):
        return progress(items, what)
    return track(items, what) if progress else items


def iterate(data: Any, progress: Progress | None = None, what: str = "batches") -> Iterator[Any]:
    """Yield the batches of `data`. Raises `DataError` if there are none."""
    empty = True
    for batch in tracked(as_batches(data), progress, what):
        empty = False
        yield batch
    if empty:
        raise DataError(
            "data has no batches: it is empty, or an iterator that is already exhausted; "
            "pass an iterable that can be reused, such as a DataLoader or a list"
        )


def run(model: nn.Module, batch: Any, forward: Forward | None = None) -> Tensor:
    """Run the model on a batch, moved to its device and dtype, and return the main output."""
    return main_output(result_of(model, batch, forward))


def result_of(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Run the model on a batch, moved to its device and dtype, and return what it returns."""
    try:
        if forward is not None:
            return forward(model, to_device(batch, model))
        images = images_of(batch)
        return model(to_device(images, model))
    except (torch.OutOfMemoryError, DataError, ModelError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError, AttributeError) as error:
        what, single = "a batch given to forward=", False
        if forward is None:
            what, single = described(images), isinstance(images, Tensor) and images.dim() == 3
        raise DataError(
            f"{type(model).__name__} failed on {what}: {error}; check the image size, the number of channels and that "
            f"every batch has at least two images, or pass forward= for unusual batches"
            + ("; if this is one image, pass batches of images: tensors with four dimensions, or lists" * single)
        ) from error


def images_of(batch: Any) -> Images:
    """The images of a batch."""
    batch = _unwrapped(batch)
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in _INPUTS if key in batch), None)
        if found is None:
            raise DataError(
                f"cannot find the images of a batch: it is a dict with the keys {list(batch)}; "
                f"use one of {_INPUTS}, or pass forward="
            )
        batch = found
    elif isinstance(batch, tuple | list) and batch and not is_image_list(batch):
        batch = batch[0]
    if isinstance(batch, tuple | list) and batch and all(isinstance(image, Tensor) for image in batch):
        for image in batch:
            _check_images(image, "each image of a list must have shape (channels, height, width)")
        return list(batch)
    if not isinstance(batch, Tensor):
        raise DataError(
            f"the images of a batch must be a tensor or a list of tensors, got {type(batch).__name__}; "
            f"pass forward= for such batches"
        )
    _check_images(batch, "images must have shape (batch, ...) with at least one image")
    return batch


def check_readable(images: Tensor) -> None:
    """Raise `DataError` for sparse and nested tensors, and for those without values."""
    if images.is_nested or images.layout != torch.strided:
        what = "a nested tensor" if images.is_nested else f"layout {images.layout}"
        raise DataError(f"images must be a dense tensor, got {what}: convert them, for example with .to_dense()")
    if images.is_meta:
        raise DataError("images on the meta device have no values: load them on the CPU or a GPU")


def _check_images(images: Tensor, shape: str) -> None:
    check_readable(images)
    if not images.is_floating_point():
        raise DataError(
            f"images must be floating point, got {images.dtype}: convert and normalise them as the model expects"
        )
    if images.dim() < 2 or images.shape[0] == 0:
        raise DataError(f"{shape}, got {tuple(images.shape)}")


def is_image_list(batch: Any) -> bool:
    """Whether a batch is a list of images without labels: tensors of 1, 3 or 4 channels.

    >>> is_image_list([torch.zeros(3, 8, 8), torch.zeros(3, 6, 9)]), is_image_list([torch.zeros(64, 3, 8)])
    (True, False)
    """
    return (
        isinstance(batch, list)
        and bool(batch)
        and all(isinstance(image, Tensor) and image.dim() == 3 for image in batch)
        and len({(image.shape[0], image.dtype) for image in batch}) == 1
        and batch[0].shape[0] in _CHANNELS
    )


def described(images: Images) -> str:
    """Images in words, for messages.

    >>> described(torch.zeros(2, 3, 8, 8)), described([torch.zeros(3, 8, 8)])
    ('images of shape (2, 3, 8, 8)', 'a list of images of shapes (3, 8, 8)')
    """
    if isinstance(images, Tensor):
        return f"images of shape {tuple(images.shape)}"
    return f"a list of images of shapes {listed([str(tuple(image.shape)) for image in images], 4)}"


def count_of(batch: Any, result: Any, forward: Forward | None) -> int:
    """The number of images in a batch. With `forward`, the number of outputs in its result."""
    if forward is None:
        return len(images_of(batch))
    if is_detections(result):
        return len(result)
    output = main_output(result)
    return len(output) if output.dim() else 1


def labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch as int64 of shape (n,), or None if it has none."""
    labels = _label_tensor(batch)
    if labels is None:
        return None
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dim() != 1 or labels.is_floating_point():
        raise DataError(f"labels must be one integer per image, got {labels.dtype} of shape {tuple(labels.shape)}")
    return labels.long()


def pixel_labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch as int64 of shape (n, height, width), or None if it has none for each pixel.

    >>> pixel_labels_of((torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.uint8))).shape
    torch.Size([2, 8, 8])
    """
    labels = _label_tensor(batch)
    if labels is None or labels.dim() < 3 or labels.is_floating_point():
        return None
    if labels.dim() == 4 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dim() != 3:
        raise DataError(f"labels must be one integer per pixel, (n, height, width), got {tuple(labels.shape)}")
    return labels.long()


def _label_tensor(batch: Any) -> Tensor | None:
    batch = _unwrapped(batch)
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in _LABELS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) > 1 and not is_image_list(batch):
        labels = batch[1]
    if isinstance(labels, tuple) and all(np.ndim(label) == 0 for label in labels):
        labels = list(labels)
    if isinstance(labels, list | np.ndarray) and len(labels) and not isinstance(labels[0], str | Mapping):
        labels = torch.as_tensor(np.asarray(labels))
    return labels if isinstance(labels, Tensor) else None


def main_output(result: Any) -> Tensor:
    """The main tensor of a model's result: the result itself, its logits, or the first of several.

    >>> main_output({"out": torch.ones(2, 3), "aux": torch.zeros(2, 3)}).sum().item()
    6.0
    """
    if isinstance(result, Tensor):
        return result
    if isinstance(getattr(result, "logits", None), Tensor):
        return result.logits  # type: ignore[no-any-return]
    if isinstance(result, Mapping):
        for key in _OUTPUTS:
            if isinstance(result.get(key), Tensor):
                return result[key]  # type: ignore[no-any-return]
    if isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
        return result[0]
    raise ModelError(
        f"cannot find the main output of the model: it returned a {type(result).__name__}; pass forward= to select it"
    )


def is_detections(result: Any) -> bool:
    """Whether a result is what torchvision's detectors return: a dict with boxes, labels and scores for each image.

    >>> found = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}
    >>> is_detections([found, found]), is_detections([]), is_detections({"out": torch.zeros(2, 5)})
    (True, False, False)
    """
    return (
        isinstance(result, tuple | list)
        and bool(result)
        and all(isinstance(one, Mapping) and {"boxes", "labels", "scores"} <= one.keys() for one in result)
    )


def to_device(batch: Any, model: nn.Module) -> Any:
    """The batch on the model's device, with floating-point tensors in the model's dtype."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    if isinstance(batch, Tensor):
        moved = batch.to(like.device, like.dtype if batch.is_floating_point() else None)
        return moved.clone() if moved.is_inference() else moved  # autograd rejects inference tensors
    if isinstance(batch, Mapping):
        return {key: to_device(value, model) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [to_device(value, model) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _unwrapped(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list) and len(batch) == 1 and isinstance(batch[0], Mapping) else batch
