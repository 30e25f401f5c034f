"""What a batch is, and how a model is run on one.

A batch may be a tensor, a tuple or list whose first item is the images and whose second the labels, or a dict with
customary keys (also wrapped in a list of one, as DALI gives it). `forward(model, batch)` takes anything else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from halve.errors import DataError, ModelError

T = TypeVar("T")
Forward = Callable[[nn.Module, Any], Any]
# rich.progress.track and tqdm.tqdm both fit: called with an iterable and a description, they give the same items.
Progress = Callable[[Iterable[Any], str], Iterable[Any]]

_INPUTS = ("image", "images", "pixel_values", "input", "inputs", "data", "x", "img")
_LABELS = ("label", "labels", "target", "targets", "cls", "y")
_OUTPUTS = ("logits", "out", "output", "outputs", "pred", "predictions")
_SPLIT = 64


def as_batches(data: Any) -> Iterable[Any]:
    """The data as something that gives batches; a single tensor is cut into batches of 64.

    >>> [len(batch) for batch in as_batches(torch.zeros(100, 3, 8, 8))]
    [64, 36]
    """
    if isinstance(data, Tensor):
        return torch.split(data, _SPLIT)
    if not isinstance(data, Iterable):
        raise DataError(f"data must give batches when iterated over, like a DataLoader; got {type(data).__name__}")
    return data


def iterate(data: Any, progress: Progress | None = None, what: str = "batches") -> Iterator[Any]:
    """The batches of `data`, one after another. Raises `DataError` when there are none."""
    batches = as_batches(data)
    empty = True
    for batch in progress(batches, what) if progress else batches:
        empty = False
        yield batch
    if empty:
        raise DataError(
            "the data gave no batch: it is empty, or an iterator that was used up before; "
            "pass something that can be iterated over again, such as a DataLoader or a list"
        )


def run(model: nn.Module, batch: Any, forward: Forward | None = None) -> Tensor:
    """The model's main output on a batch, which is moved to the model's device and dtype first."""
    try:
        if forward is not None:
            return main_output(forward(model, to_device(batch, model)))
        images = images_of(batch)
        return main_output(model(to_device(images, model)))
    except (torch.OutOfMemoryError, DataError, ModelError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError, AttributeError) as error:
        shape = tuple(images_of(batch).shape) if forward is None else "your forward's batch"
        raise DataError(
            f"{type(model).__name__} cannot run on images of shape {shape}: {error}; "
            f"check size, channels and that no batch has a single image, or pass forward= for an unusual batch"
        ) from error


def images_of(batch: Any) -> Tensor:
    """The images of a batch."""
    batch = _unwrapped(batch)
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in _INPUTS if key in batch), None)
        if found is None:
            raise DataError(
                f"a batch is a dict with the keys {list(batch)}; known for images are {_INPUTS}, or pass forward="
            )
        batch = found
    elif isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise DataError(
            f"the images of a batch are a {type(batch).__name__}, not a tensor; pass forward= for such batches"
        )
    if not batch.is_floating_point():
        raise DataError(
            f"images are {batch.dtype}: convert them to floating point and normalise them as the model expects"
        )
    if batch.dim() < 2 or batch.shape[0] == 0:
        raise DataError(f"images have the shape {tuple(batch.shape)}; the first axis must count the images of a batch")
    return batch


def count_of(batch: Any, output: Tensor, forward: Forward | None) -> int:
    """How many images a batch held; where only `forward` knows, as many as there are outputs."""
    return len(images_of(batch)) if forward is None else len(output) if output.dim() else 1


def labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch as int64 of shape (n,), None where it has none."""
    batch = _unwrapped(batch)
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in _LABELS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        labels = batch[1]
    if isinstance(labels, list | np.ndarray) and len(labels) and not isinstance(labels[0], str):
        labels = torch.as_tensor(np.asarray(labels))
    if not isinstance(labels, Tensor):
        return None
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dim() != 1 or labels.is_floating_point():
        raise DataError(f"labels must be one integer per image, got {labels.dtype} of shape {tuple(labels.shape)}")
    return labels.long()


def main_output(result: Any) -> Tensor:
    """The tensor that a model's result is about: itself, its logits, or the first of several.

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
    raise ModelError(f"cannot tell which output of the model counts: it gave a {type(result).__name__}; pass forward=")


def to_device(batch: Any, model: nn.Module) -> Any:
    """The batch on the model's device, floating tensors in the model's floating dtype."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    if isinstance(batch, Tensor):
        moved = batch.to(like.device, like.dtype if batch.is_floating_point() else None)
        return moved.clone() if moved.is_inference() else moved  # autograd refuses tensors made in inference mode
    if isinstance(batch, Mapping):
        return {key: to_device(value, model) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [to_device(value, model) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _unwrapped(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list) and len(batch) == 1 and isinstance(batch[0], Mapping) else batch
