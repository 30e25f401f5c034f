"""What a file takes and returns, where that is not what the model does.

A detector takes a list of images and returns boxes: its file takes the batch of images that its own transform makes,
and returns what its heads compute. With preprocessing in the file, it takes pixels.
"""

import inspect
import itertools
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.batches import check_readable, images_of
from halve.detectors import takes_lists
from halve.errors import ModelError, OptionError

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel, of 0..1
_INNER = "model"  # the name of the wrapped model


class Entry:
    """How a model is wrapped, and which inputs its file takes."""

    def __init__(self, model: nn.Module, preprocess: Normalization | None) -> None:
        """Raises `ModelError` for detectors that cannot be exported.

        Args:
            model: The model. It is only looked at.
            preprocess: The normalisation to include; None for none. A detector's is that of its own transform.
        """
        self.is_detector = takes_lists(model)
        if self.is_detector and not all(hasattr(model, part) for part in ("backbone", "head", "transform")):
            raise ModelError(
                f"{type(model).__name__} is a detector with two stages and cannot be exported as one graph; detectors "
                f"with one stage (RetinaNet, SSD, FCOS) can be exported up to their heads, of this one its backbone"
            )
        self._transform: Any = model.transform if self.is_detector else None
        self._parameters = inspect.signature(model.forward).parameters.values()
        self.preprocess = checked_preprocess(preprocess)
        if self.is_detector and self.preprocess is not None:
            transform: Any = self._transform
            self.preprocess = checked_preprocess((transform.image_mean, transform.image_std))

    @property
    def prefix(self) -> str:
        """The name of the model inside of the wrapped one."""
        return ".".join([_INNER] * (self.is_detector + (self.preprocess is not None)))

    def names(self, count: int) -> tuple[str, ...]:
        """The names of the model's first inputs; fewer if its code has none for them."""
        named = itertools.takewhile(lambda p: p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD), self._parameters)
        return tuple(parameter.name for parameter in named)[:count]

    @property
    def notes(self) -> list[str]:
        """What the user must know about inputs and outputs."""
        notes = []
        if self.is_detector:
            notes.append(
                "the file ends at the detector's heads: anchors, decoding and suppression of boxes stay outside; it "
                "takes the batch that model.transform returns, of the size that the example has there"
            )
        if self.preprocess is not None:
            notes.append("the file takes pixels: uint8 from 0 to 255, resized and cropped, and normalises them itself")
        return notes

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The module that computes what the file computes."""
        module = RawHeads(model) if self.is_detector else model
        return module if self.preprocess is None else Normalized(module, *self.preprocess)

    def inputs(self, example: Any) -> tuple[Tensor, ...]:
        """The inputs of the file for an example of the model's: a tuple of tensors, or any batch."""
        if isinstance(example, tuple) and all(isinstance(x, Tensor) for x in example):
            inputs: tuple[Any, ...] = example
        else:
            inputs = (images_of(example),)
        if self._transform is not None:
            with torch.no_grad():
                inputs = (self._transform([image.cpu() for image in inputs[0]])[0].tensors,)
        if not inputs or not all(isinstance(x, Tensor) and x.dim() and len(x) for x in inputs):
            raise OptionError("example must be a tensor of images or a tuple of tensors, as the model takes them")
        for x in inputs:
            check_readable(x)
        if len({len(x) for x in inputs}) > 1:
            shapes = [tuple(x.shape) for x in inputs]
            raise OptionError(
                f"the example's inputs have shapes {shapes}: their first dimension must be the batch size"
            )
        plain = pytree.tree_map(_plain, inputs)
        return plain if self.preprocess is None else (pixels(plain[0], *self.preprocess), *plain[1:])


class RawHeads(nn.Module):
    """A one-stage detector of torchvision's, up to what its heads return."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        model: Any = self.model
        features = model.backbone(images)
        levels = [features] if isinstance(features, Tensor) else list(features.values())
        outputs: dict[str, Tensor] = model.head(levels)
        return outputs


class Normalized(nn.Module):
    """A model with the normalisation of pixels in front of it: those of its first input."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        center, spread = (torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1) for values in (mean, std))
        self.register_buffer("scale", (1 / (255 * spread)).float())
        self.register_buffer("shift", (-center / spread).float())

    def forward(self, images: Tensor, *others: Tensor) -> Any:
        return self.model(images.to(self.scale.dtype) * self.scale + self.shift, *others)


def pixels(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """The pixels, from 0 to 255, that normalised images were made from.

    >>> pixels(torch.tensor([[[[-1.0, 1.0]]]]), (0.5,), (0.5,)).tolist()
    [[[[0, 255]]]]
    """
    if images.dim() != 4 or images.shape[1] != len(mean):
        raise OptionError(
            f"preprocessing for {len(mean)} channels needs images of shape (n, {len(mean)}, height, width), "
            f"got {tuple(images.shape)}"
        )
    center, spread = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (mean, std))
    return (255 * (images * spread + center)).round().clamp(0, 255).to(torch.uint8)


def checked_preprocess(preprocess: Any) -> Normalization | None:
    """(mean, std) as tuples of numbers. Raises `OptionError` for anything else but None."""
    if preprocess is None:
        return None
    try:
        mean, std = (tuple(float(value) for value in values) for values in preprocess)
    except (TypeError, ValueError) as error:
        raise OptionError(f"preprocess must be (mean, std), one number per channel each; got {preprocess!r}") from error
    if len(mean) != len(std) or not mean or min(std) <= 0:
        raise OptionError(f"preprocess must have as many means as positive standard deviations; got {preprocess!r}")
    return mean, std


def _plain(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return x.float() if x.is_floating_point() else x
