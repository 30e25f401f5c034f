"""Images to quantise by: most to calibrate on, the others to choose and to measure on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halve.batches import images_of, iterate
from halve.errors import DataError, listed

LEAST_IMAGES = 8
BATCH = 8
_HELD_OUT = 0.25  # of the images, to choose on
_MOST_HELD_OUT = 128


@dataclass(frozen=True)
class CalibrationImages:
    """Images to calibrate on, and others to choose and measure on: a tensor for each input of the file."""

    calibration: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, data: Any, inputs_of: Callable[[Any], tuple[Tensor, ...]], example: tuple[Tensor, ...]
    ) -> "CalibrationImages":
        """Read all images of some data.

        Args:
            data: Batches that the model takes.
            inputs_of: The inputs of the file for a batch.
            example: The inputs of the file for the example.
        """
        count, wanted = len(example), [tuple(x.shape[1:]) for x in example]
        parts = []
        for batch in iterate(data):
            parts.append(inputs_of(images_of(batch) if count == 1 else _several(batch, count)))
            if (found := [tuple(x.shape[1:]) for x in parts[-1]]) != wanted:
                raise DataError(
                    f"calibration images must have the size of the example: they are {listed(found)}, it is "
                    f"{listed(wanted)} (without the batch size)"
                )
        images = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        if not all(bool(x.isfinite().all()) for x in images):
            raise DataError("calibration images must be finite: some contain NaN or infinity")
        total = len(images[0])
        if total < LEAST_IMAGES:
            raise DataError(f"calibration needs at least {LEAST_IMAGES} images, got {total}; use a few hundred")
        held_out = min(max(LEAST_IMAGES // 2, round(_HELD_OUT * total)), _MOST_HELD_OUT)
        return cls(tuple(x[:-held_out] for x in images), tuple(x[-held_out:] for x in images))

    def with_held_out(self, count: int) -> "CalibrationImages":
        """The same, with so many held-out images at most."""
        return replace(self, held_out=tuple(x[:count] for x in self.held_out))


def batches_of(images: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Images in batches of 8."""
    return list(zip(*(x.split(BATCH) for x in images), strict=True))


def _several(batch: Any, count: int) -> tuple[Tensor, ...]:
    """The inputs in a batch for a model that takes several."""
    given = tuple(batch[:count]) if isinstance(batch, tuple | list) else ()
    if len(given) < count or not all(isinstance(x, Tensor) for x in given):
        raise DataError(f"each calibration batch must be a tuple of {count} tensors, as the model takes them")
    return given
