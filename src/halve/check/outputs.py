"""Outputs that can be counted: tensors, or the boxes of detectors, all of them finite."""

from typing import Any

from torch import Tensor

from halve.batches import is_detections, main_output
from halve.errors import DataError, ModelError

Detections = list[dict[str, Tensor]]  # boxes, labels and scores of each image


def tensor_of(result: Any, index: int, which: str = "") -> Tensor:
    """The main output of a model in single precision.

    Args:
        result: What the model returned.
        index: The number of the batch, for messages.
        which: Which model it was, such as "dense ", for messages.
    """
    output = main_output(result)
    if not output.is_floating_point() or not output.dim():
        raise ModelError(
            f"the {which}model returned {output.dtype} outputs of shape {tuple(output.shape)}: floating-point outputs "
            f"of shape (images, ...) are needed, such as class scores; pass forward= to return them"
        )
    _check_finite(output, index, which)
    return output.float()


def detections_of(result: Any, index: int, which: str = "") -> Detections:
    """The boxes, labels and scores of each image. The arguments are those of `tensor_of`."""
    if not is_detections(result):
        raise ModelError(
            f"task='detection' needs a list of dicts with boxes, labels and scores, one per image, as torchvision's "
            f"detectors return it, but the {which}model returned a {type(result).__name__}; pass forward= to convert it"
        )
    found = [{key: one[key].detach().cpu() for key in ("boxes", "labels", "scores")} for one in result]
    for one in found:
        shapes = {key: tuple(value.shape) for key, value in one.items()}
        count = one["scores"].shape[:1]
        if shapes != {"boxes": (*count, 4), "labels": (*count,), "scores": (*count,)}:
            got = ", ".join(f"{key} {shape}" for key, shape in shapes.items())
            raise ModelError(f"boxes must have shape (n, 4), labels and scores (n,); the {which}model returned {got}")
        _check_finite(one["boxes"], index, which)
        _check_finite(one["scores"], index, which)
    return found


def _check_finite(output: Tensor, index: int, which: str) -> None:
    if not bool(output.isfinite().all()):
        raise DataError(
            f"the {which}model returned NaN or infinity for batch {index}: check the images and the weights"
        )
