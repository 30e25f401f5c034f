"""How well a masked model does, and how far it goes along with the dense one."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halve.agreement import Agreement, compare
from halve.batches import Forward, Progress, iterate, labels_of, run
from halve.errors import DataError, ModelError
from halve.masks.apply import OnChanged, apply
from halve.masks.mask import MaskSet
from halve.modules import clone

_TOP = 5


@dataclass(frozen=True)
class Evaluation:
    """Shares are from 0 to 1; None where there is nothing to count: no labels, no dense model, under 5 classes."""

    images: int
    outputs: int  # classes that the model tells apart
    top1: float | None = None
    top5: float | None = None
    agreement: float | None = None  # share of images with the dense model's top-1 class
    kl: float | None = None  # mean KL divergence of the outputs from the dense model's, in nats
    dense_top1: float | None = None
    dense_top5: float | None = None


def evaluate(
    model: nn.Module,
    masks: MaskSet | None,
    data: Any,
    *,
    dense: nn.Module | None = None,
    classes: Sequence[int] | None = None,
    forward: Forward | None = None,
    progress: Progress | None = None,
    on_changed: OnChanged = "warn",
) -> Evaluation:
    """Run the model, with `masks` on (None: as it is), over `data` and count.

    - Batches with labels give accuracies; batches without still give agreement with the dense model, which is `model`
      itself when `masks` are given, or `dense`.
    - `classes`: for data that holds only some of the classifier's classes, `classes[i]` is the classifier's output for
      label i. All outputs still compete.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)).eval()
    >>> data = [(torch.randn(32, 8), torch.randint(0, 10, (32,)))]
    >>> all_kept = halve.prune(model, pattern="4:4")
    >>> result = halve.evaluate(model, all_kept, data)
    >>> result.agreement, result.top1 == result.dense_top1
    (1.0, True)
    """
    if masks is not None:
        if dense is not None:
            raise ModelError("evaluate takes masks, then the model itself is the dense one, or dense=, not both")
        dense, subject = model, apply(model, masks, on_changed=on_changed).eval()
    else:
        subject = clone(model).eval()
    reference = None if dense is None else clone(dense).eval()
    count = _Count()
    with torch.no_grad():
        for index, batch in enumerate(iterate(data, progress, "images")):
            output = _finite(run(subject, batch, forward), index, "masked " if masks is not None else "")
            against = None if reference is None else _finite(run(reference, batch, forward), index, "dense ")
            if against is not None and against.shape != output.shape:
                raise ModelError(f"the model gives {output.shape[1]} outputs, the dense model {against.shape[1]}")
            count.add(output, against, _targets(_labels(batch, forward), classes, output, index))
    return count.result()


class _Count:
    def __init__(self) -> None:
        self.images = self.labelled = self.outputs = 0
        self.hits = {"top1": 0, "top5": 0, "dense_top1": 0, "dense_top5": 0}
        self.agreement = Agreement()

    def add(self, output: Tensor, against: Tensor | None, target: Tensor | None) -> None:
        self.images += len(output)
        self.outputs = output.shape[1]
        if target is not None:
            self.labelled += len(output)
            self._hit("", output, target)
            if against is not None:
                self._hit("dense_", against, target)
        if against is not None:
            self.agreement += compare(output, against)

    def _hit(self, prefix: str, output: Tensor, target: Tensor) -> None:
        best = output.topk(min(_TOP, output.shape[1])).indices == target.to(output.device)[:, None]
        self.hits[f"{prefix}top1"] += int(best[:, 0].sum())
        self.hits[f"{prefix}top5"] += int(best.sum())

    def result(self) -> Evaluation:
        if self.labelled not in (0, self.images):
            raise DataError(f"only {self.labelled} of {self.images} images have labels: give labels to all or to none")
        compared = self.agreement.images > 0
        shares: dict[str, float] = {}
        for name, hits in self.hits.items():
            known = self.labelled and (compared or not name.startswith("dense_"))
            if known and not (name.endswith("top5") and self.outputs < _TOP):
                shares[name] = hits / self.labelled
        if compared:
            shares |= {"agreement": self.agreement.share, "kl": self.agreement.kl}
        return Evaluation(self.images, self.outputs, **shares)


def _finite(output: Tensor, index: int, which: str) -> Tensor:
    if output.dim() != 2:
        raise ModelError(
            f"evaluate needs one row of class scores per image, the model gave the shape {tuple(output.shape)}; "
            f"pass forward= to choose or reduce its outputs"
        )
    if not bool(output.isfinite().all()):
        raise DataError(f"the {which}model gave NaN or infinity for batch {index}: check the images and the weights")
    return output.float()


def _labels(batch: Any, forward: Forward | None) -> Tensor | None:
    try:
        return labels_of(batch)
    except DataError:
        if forward is None:
            raise
        return None  # an unusual batch need not have labels where others have them


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
            f"labels from {low} to {high} in batch {index}, but {what}; "
            f"classes= maps the data's labels to the classifier's outputs"
        )
    if classes is None:
        return labels
    try:
        outputs = torch.tensor([operator.index(output) for output in classes], dtype=torch.long)
    except TypeError as error:
        raise DataError(f"classes= must list integers, outputs of the classifier: {error}") from error
    if len(outputs) and not 0 <= int(outputs.min()) <= int(outputs.max()) < output.shape[1]:
        raise DataError(f"classes= must name outputs from 0 to {output.shape[1] - 1}")
    return outputs[labels.cpu()]
