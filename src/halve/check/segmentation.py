"""Evaluate dense prediction: pixel accuracy, pixel agreement with the dense model, and mean intersection over union."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.agreement import kl_divergence
from halve.batches import pixel_labels_of
from halve.errors import DataError, ModelError

_IGNORED = 255  # the customary label of pixels without a class; so are negative numbers


class Overlap:
    """Intersection and union of two maps of classes, for each class.

    >>> overlap = Overlap()
    >>> overlap.add(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), classes=3)
    >>> round(overlap.mean_iou, 3), overlap.same_share  # classes 0 and 1: 1/2 and 2/3
    (0.583, 0.75)
    """

    def __init__(self) -> None:
        self._both = self._either = torch.zeros(0, dtype=torch.long)
        self.pixels = 0

    def add(self, predicted: Tensor, expected: Tensor, classes: int) -> None:
        """Count the pixels of two maps."""
        if not self.pixels:
            self._both = self._either = torch.zeros(classes, dtype=torch.long)
        both = _counts(predicted[predicted == expected], classes)
        self._both = self._both + both
        self._either = self._either + _counts(predicted, classes) + _counts(expected, classes) - both
        self.pixels += predicted.numel()

    @property
    def mean_iou(self) -> float:
        """Mean over the classes that occur in one of the maps of their intersection over union."""
        occurs = self._either > 0
        return float((self._both[occurs].double() / self._either[occurs]).mean())

    @property
    def same_share(self) -> float:
        """Share of pixels with the same class."""
        return int(self._both.sum()) / self.pixels


class SegmentationCount:
    """Counts over batches. Outputs are class scores of pixels, (images, classes, height, width)."""

    def __init__(self) -> None:
        self._images = self._labelled = self._outputs = 0
        self._kl_sum = 0.0
        self._with_labels, self._dense_with_labels, self._with_dense = Overlap(), Overlap(), Overlap()

    def add(self, output: Tensor, dense: Tensor | None, batch: Any, index: int) -> None:
        """Count a batch. `dense` is the dense model's output, if it is compared."""
        if output.dim() != 4 or output.shape[1] < 2:
            raise ModelError(
                f"task='segmentation' needs the scores of two classes or more, (images, classes, height, width), got "
                f"{tuple(output.shape)}; if the model returns one score, for one class against the rest, pass a "
                f"forward= that returns torch.cat([-score, score], 1)"
            )
        labels = self._labels(batch, output, index)
        self._images, self._outputs = self._images + len(output), output.shape[1]
        self._labelled += 0 if labels is None else len(output)
        for place in range(len(output)):  # one at a time: scores of many pixels and classes take much memory
            label = None if labels is None else labels[place].to(output.device)
            self._add_image(output[place], None if dense is None else dense[place], label)

    def _add_image(self, scores: Tensor, dense: Tensor | None, label: Tensor | None) -> None:
        classes = len(scores)
        if dense is not None:
            self._with_dense.add(scores.argmax(0), dense.argmax(0), classes)
            self._kl_sum += float(kl_divergence(scores.flatten(1).T, dense.flatten(1).T).sum())
        if label is not None:
            known = (label >= 0) & ((label != _IGNORED) | (classes > _IGNORED))
            self._with_labels.add(_resized(scores, label).argmax(0)[known], label[known], classes)
            if dense is not None:
                self._dense_with_labels.add(_resized(dense, label).argmax(0)[known], label[known], classes)

    def _labels(self, batch: Any, output: Tensor, index: int) -> Tensor | None:
        labels = pixel_labels_of(batch)
        if labels is None:
            return None
        if len(labels) != len(output):
            raise DataError(f"batch {index} has {len(labels)} label maps for {len(output)} outputs")
        highest = int(torch.where(labels == _IGNORED, -1, labels).max()) if labels.numel() else 0
        if highest >= output.shape[1]:
            raise DataError(
                f"batch {index} has labels up to {highest}, but the model scores {output.shape[1]} classes; "
                f"pixels labelled {_IGNORED} or negative are ignored"
            )
        return labels

    def shares(self) -> dict[str, Any]:
        """The fields of an `Evaluation`."""
        if self._labelled not in (0, self._images):
            raise DataError(f"only {self._labelled} of {self._images} images have labels: label all of them or none")
        shares: dict[str, Any] = {"images": self._images, "outputs": self._outputs}
        for prefix, overlap in (("", self._with_labels), ("dense_", self._dense_with_labels)):
            if overlap.pixels:
                shares |= {f"{prefix}top1": overlap.same_share, f"{prefix}miou": overlap.mean_iou}
        if self._with_dense.pixels:
            shares["agreement"] = self._with_dense.same_share
            shares["kl"] = max(0.0, self._kl_sum / self._with_dense.pixels)
            shares["miou_to_dense"] = self._with_dense.mean_iou
        return shares


def _counts(classes: Tensor, number: int) -> Tensor:
    return torch.bincount(classes.flatten(), minlength=number).cpu()


def _resized(scores: Tensor, label: Tensor) -> Tensor:
    """Class scores in the size of the labels."""
    if scores.shape[1:] == label.shape:
        return scores
    return F.interpolate(scores[None], label.shape, mode="bilinear", align_corners=False)[0]
