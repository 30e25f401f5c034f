"""Evaluate classifiers: accuracy, and agreement with the dense model's top-1 classes."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halve.agreement import Agreement, compare
from halve.batches import Forward, labels_of
from halve.errors import DataError, ModelError, OptionError

_TOP = 5


class ClassificationCount:
    """Counts over batches. Outputs are class scores, (images, classes)."""

    def __init__(self, classes: Sequence[int] | None, forward: Forward | None) -> None:
        self._classes, self._forward = classes, forward
        self._images = self._labelled = self._outputs = 0
        self._hits = {"top1": 0, "top5": 0, "dense_top1": 0, "dense_top5": 0}
        self._agreement = Agreement()

    def add(self, output: Tensor, dense: Tensor | None, batch: Any, index: int) -> None:
        """Count a batch. `dense` is the dense model's output, if it is compared."""
        if output.dim() != 2:
            raise ModelError(f"task='classification' needs outputs (images, classes), got {tuple(output.shape)}")
        target = _targets(self._labels(batch), self._classes, output, index)
        self._images += len(output)
        self._outputs = output.shape[1]
        if target is not None:
            self._labelled += len(output)
            self._hit("", output, target)
            if dense is not None:
                self._hit("dense_", dense, target)
        if dense is not None:
            self._agreement += compare(output, dense)

    def _labels(self, batch: Any) -> Tensor | None:
        try:
            return labels_of(batch)
        except DataError:
            if self._forward is None:
                raise
            return None  # in an unusual batch, what looks like labels may be something else

    def _hit(self, prefix: str, output: Tensor, target: Tensor) -> None:
        best = output.topk(min(_TOP, output.shape[1])).indices == target.to(output.device)[:, None]
        self._hits[f"{prefix}top1"] += int(best[:, 0].sum())
        self._hits[f"{prefix}top5"] += int(best.sum())

    def shares(self) -> dict[str, Any]:
        """The fields of an `Evaluation`."""
        if self._labelled not in (0, self._images):
            raise DataError(f"only {self._labelled} of {self._images} images have labels: label all of them or none")
        compared = self._agreement.images > 0
        shares: dict[str, Any] = {"images": self._images, "outputs": self._outputs}
        for name, hits in self._hits.items():
            known = self._labelled and (compared or not name.startswith("dense_"))
            if known and not (name.endswith("top5") and self._outputs < _TOP):
                shares[name] = hits / self._labelled
        if compared:
            shares |= {"agreement": self._agreement.share, "kl": self._agreement.kl}
        return shares


def _targets(labels: Tensor | None, classes: Sequence[int] | None, output: Tensor, index: int) -> Tensor | None:
    if labels is None:
        return None
    if len(labels) != len(output):
        raise DataError(f"batch {index} has {len(labels)} labels for {len(output)} outputs")
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    allowed = output.shape[1] if classes is None else len(classes)
    if low < 0 or high >= allowed:
        what = f"the classifier has {allowed} outputs" if classes is None else f"classes= lists {allowed}"
        raise DataError(
            f"batch {index} has labels from {low} to {high}, but {what}; "
            f"classes= maps the data's labels to the classifier's outputs"
        )
    if classes is None:
        return labels
    try:
        outputs = torch.tensor([operator.index(output) for output in classes], dtype=torch.long)
    except TypeError as error:
        raise OptionError(f"classes= must list integers, the classifier's outputs: {error}") from error
    if len(outputs) and not 0 <= int(outputs.min()) <= int(outputs.max()) < output.shape[1]:
        raise OptionError(f"classes= must list outputs from 0 to {output.shape[1] - 1}")
    return outputs[labels.cpu()]
