"""Measure a masked model's accuracy, and its agreement with the dense model."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halve.agreement import Agreement, compare
from halve.batches import Forward, Progress, iterate, labels_of, run
from halve.errors import DataError, ModelError, OptionError
from halve.masks.apply import OnChanged, apply, check_dense
from halve.masks.mask import MaskSet
from halve.modules import check_initialised, clone, unwrapped
from halve.process_state import preserved_process_state

_TOP = 5


@dataclass(frozen=True)
class Evaluation:
    """Results; shares are from 0 to 1, and None without labels, without a dense model, or (top-5) under 5 classes."""

    images: int
    outputs: int  # classes of the model
    top1: float | None = None
    top5: float | None = None
    agreement: float | None = None  # share of images with the dense model's top-1 class
    kl: float | None = None  # mean KL divergence from the dense model's outputs, in nats
    dense_top1: float | None = None
    dense_top5: float | None = None


@preserved_process_state()
def evaluate(
    model: nn.Module,
    masks: MaskSet | None,
    data: Any,
    *,
    dense: nn.Module | None = None,
    classes: Sequence[int] | None = None,
    forward: Forward | None = None,
    progress: Progress = True,
    on_changed: OnChanged = "warn",
) -> Evaluation:
    """Measure a model's accuracy, and its agreement with the dense model.

    Args:
        model: The dense model. It is not changed.
        masks: Masks to apply; None evaluates the model itself.
        data: Batches of images. Accuracy needs labels, agreement does not.
        dense: Without masks, the model to compare with. With masks that is `model`.
        classes: For data with only some of the model's classes, the model's output for each label. All outputs still
            compete.
        forward: `forward(model, batch)` runs the model on an unusual batch.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)).eval()
    >>> data = [(torch.randn(32, 8), torch.randint(0, 10, (32,)))]
    >>> all_kept = halve.prune(model, pattern="4:4")
    >>> result = halve.evaluate(model, all_kept, data)
    >>> result.agreement, result.top1 == result.dense_top1
    (1.0, True)
    """
    model = unwrapped(model)
    check_initialised(model)
    if masks is not None:
        if dense is not None:
            raise OptionError("evaluate accepts masks or dense=, not both: with masks, `model` is the dense one")
        check_dense(model, masks)
        dense, subject = model, apply(model, masks, on_changed=on_changed).eval()
    else:
        subject = clone(model).eval()
    reference = None if dense is None else clone(unwrapped(dense)).eval()
    count = _Count()
    with torch.no_grad():
        for index, batch in enumerate(iterate(data, progress, "images")):
            output = _finite(run(subject, batch, forward), index, "masked " if masks is not None else "")
            against = None if reference is None else _finite(run(reference, batch, forward), index, "dense ")
            if against is not None and against.shape != output.shape:
                raise ModelError(f"the model has {output.shape[1]} outputs, but the dense model {against.shape[1]}")
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
            raise DataError(f"only {self.labelled} of {self.images} images have labels: label all of them or none")
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
            f"evaluate needs one row of class scores per image, but the model returned shape {tuple(output.shape)}; "
            f"pass forward= to select or reduce its outputs"
        )
    if not bool(output.isfinite().all()):
        raise DataError(
            f"the {which}model returned NaN or infinity for batch {index}: check the images and the weights"
        )
    return output.float()


def _labels(batch: Any, forward: Forward | None) -> Tensor | None:
    try:
        return labels_of(batch)
    except DataError:
        if forward is None:
            raise
        return None  # in an unusual batch, what looks like labels may be something else


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
