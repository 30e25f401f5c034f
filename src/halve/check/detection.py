"""Evaluate detectors: how far their boxes agree with those of the dense model.

A box of one model has a partner in the other if that one has a box with the same label and an intersection over union
of at least 0.5. Boxes look for partners in the order of their scores, and take the free one with the highest overlap.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halve.check.outputs import Detections

IOU = 0.5


class DetectionCount:
    """Counts over batches. Results are dicts with boxes, labels and scores, one per image."""

    def __init__(self, min_score: float) -> None:
        self._min_score = min_score
        self._images = 0
        self._boxes, self._dense_boxes = 0, 0
        self._confirmed, self._found = 0, 0
        self._compared = False

    def add(self, found: Detections, dense: Detections | None, batch: Any, index: int) -> None:
        """Count a batch. `dense` is what the dense model found, if it is compared."""
        self._images += len(found)
        self._boxes += self._counted(found)
        if dense is not None:
            self._compared = True
            self._dense_boxes += self._counted(dense)
            for ours, theirs in zip(found, dense, strict=True):
                self._confirmed += partners(ours, theirs, self._min_score)
                self._found += partners(theirs, ours, self._min_score)

    def _counted(self, found: Detections) -> int:
        return sum(int((one["scores"] >= self._min_score).sum()) for one in found)

    def shares(self) -> dict[str, Any]:
        """The fields of an `Evaluation`."""
        shares: dict[str, Any] = {"images": self._images, "boxes": self._boxes}
        if not self._compared:
            return shares
        both = self._boxes + self._dense_boxes
        return shares | {
            "dense_boxes": self._dense_boxes,
            "agreement": (self._confirmed + self._found) / both if both else None,
            "precision": self._confirmed / self._boxes if self._boxes else None,
            "recall": self._found / self._dense_boxes if self._dense_boxes else None,
        }


def partners(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], min_score: float = 0.0) -> int:
    """How many of our boxes with at least this score have a partner among their boxes, of whatever score.

    >>> box = torch.tensor([[0.0, 0.0, 4.0, 4.0]])
    >>> ours = {"boxes": torch.cat([box, box]), "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.9, 0.8])}
    >>> theirs = {"boxes": box + 1, "labels": torch.tensor([1]), "scores": torch.tensor([0.3])}
    >>> partners(ours, theirs)  # 9 of 23 pixels overlap
    0
    >>> partners(ours, theirs | {"boxes": box + 0.5})
    1
    """
    overlap = intersection_over_union(ours["boxes"].float(), theirs["boxes"].float())
    overlap = overlap * (ours["labels"][:, None] == theirs["labels"][None, :])
    count = 0
    for place in ours["scores"].argsort(descending=True, stable=True).tolist():
        if float(ours["scores"][place]) < min_score or not overlap.shape[1]:
            break
        best = int(overlap[place].argmax())
        if float(overlap[place, best]) >= IOU:
            count += 1
            overlap[:, best] = 0  # taken
    return count


def intersection_over_union(one: Tensor, other: Tensor) -> Tensor:
    """The overlap of every box of one set with every box of another, boxes as (left, top, right, bottom).

    Equal boxes overlap by 1, also those without an area, which lie beyond the edge of an image.

    >>> intersection_over_union(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0]]))
    tensor([[0.3333]])
    >>> intersection_over_union(*2 * [torch.tensor([[9.0, 0.0, 9.0, 2.0]])])
    tensor([[1.]])
    """
    low = torch.maximum(one[:, None, :2], other[None, :, :2])
    high = torch.minimum(one[:, None, 2:], other[None, :, 2:])
    both = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (one, other)]
    overlap = both / (areas[0][:, None] + areas[1][None, :] - both).clamp(min=1e-12)
    equal = (one[:, None] == other[None, :]).all(2)
    return overlap.masked_fill(equal, 1.0)
