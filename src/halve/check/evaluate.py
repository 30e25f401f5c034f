"""Measure a masked model's accuracy, and its agreement with the dense model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress, is_detections, iterate, main_output, pixel_labels_of, result_of
from halve.check.classification import ClassificationCount
from halve.check.detection import DetectionCount
from halve.check.outputs import detections_of, tensor_of
from halve.check.per_layer import LayerLoss, LayerLosses
from halve.check.regression import RegressionCount
from halve.check.segmentation import SegmentationCount
from halve.errors import ModelError, OptionError, listed
from halve.markup import table
from halve.masks.apply import OnChanged, apply, check_dense
from halve.masks.mask import MaskSet
from halve.modules import check_initialised, clone, unwrapped
from halve.process_state import preserved_process_state

Task = Literal["classification", "segmentation", "detection", "regression"]
FIELDS: dict[Task, tuple[str, ...]] = {  # what is measured of each task
    "classification": (
        *("images", "outputs", "top1", "top5", "agreement", "agreement_interval", "kl", "dense_top1", "dense_top5"),
    ),
    "segmentation": (
        *("images", "outputs", "top1", "miou", "agreement", "miou_to_dense", "kl", "dense_top1", "dense_miou"),
    ),
    "detection": ("images", "boxes", "dense_boxes", "agreement", "precision", "recall"),
    "regression": ("images", "output_error"),
}


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Results; shares are from 0 to 1. What the task does not have, or needs labels or a dense model for, is None.

    Args:
        images: Number of images.
        outputs: Classes of the model.
        top1: Share of images, or pixels, whose class is right.
        top5: Share of images whose class is among the five with the highest scores; None under 5 classes.
        agreement: Share of images or pixels with the dense model's class; of the boxes of both models, the share with a
            partner in the other model.
        agreement_interval: For images, the 95 % confidence interval of the agreement on others of the same kind, exact
            (Clopper-Pearson). `halve.certify` states it with its assumptions.
        kl: Mean KL divergence from the dense model's outputs, per image or pixel, in nats.
        dense_top1: `top1` of the dense model.
        dense_top5: `top5` of the dense model.
        task: What the outputs are.
        miou: Mean intersection over union with the labels, over all classes that occur.
        dense_miou: `miou` of the dense model.
        miou_to_dense: Mean intersection over union with the dense model's classes.
        boxes: Number of boxes that the model returned.
        dense_boxes: Number of boxes that the dense model returned.
        precision: Share of the model's boxes that have a partner among the dense model's.
        recall: Share of the dense model's boxes that have a partner among the model's.
        output_error: Norm of the difference to the dense model's outputs, relative to the norm of those.
        layers: What is lost when each layer alone is masked, by name, if that was asked for.
    """

    images: int
    outputs: int | None = None
    top1: float | None = None
    top5: float | None = None
    agreement: float | None = None
    kl: float | None = None
    dense_top1: float | None = None
    dense_top5: float | None = None
    task: Task = "classification"
    miou: float | None = None
    dense_miou: float | None = None
    miou_to_dense: float | None = None
    boxes: int | None = None
    dense_boxes: int | None = None
    precision: float | None = None
    recall: float | None = None
    output_error: float | None = None
    agreement_interval: tuple[float, float] | None = None
    layers: Mapping[str, LayerLoss] | None = None

    def as_json(self) -> dict[str, Any]:
        """What is measured of the task, as plain values."""
        measured = {"task": self.task, **{name: getattr(self, name) for name in FIELDS[self.task]}}
        if self.layers is None:
            return measured
        return measured | {"layers": {name: asdict(loss) for name, loss in self.layers.items()}}

    def _repr_html_(self) -> str:
        """A table for notebooks: the model, the dense model where it was measured, and the layers."""
        names = [name for name in FIELDS[self.task] if not name.startswith("dense_")]
        rows = [
            (name.replace("_", " "), _cell(getattr(self, name)), _cell(getattr(self, f"dense_{name}", None)))
            for name in names
        ]
        shown = table(f"{self.task}, {self.images:,} images", ("", ">model", ">dense"), rows)
        if self.layers is None:
            return shown
        losses = [(name, *map(_cell, asdict(loss).values())) for name, loss in self.layers.items()]
        heads = ("layer", *(f">{field.name.replace('_', ' ')}" for field in fields(LayerLoss)))
        return shown + table("each layer masked alone", heads, losses)

    def __repr__(self) -> str:
        known = {name: value for name, value in self.as_json().items() if value is not None and name != "layers"}
        return f"Evaluation({', '.join(f'{name}={value!r}' for name, value in known.items())})"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " to ".join(map(_cell, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


@preserved_process_state()
def evaluate(
    model: nn.Module,
    masks: MaskSet | None,
    data: Any,
    *,
    dense: nn.Module | None = None,
    task: Task | None = None,
    classes: Sequence[int] | None = None,
    min_score: float = 0.0,
    per_layer: bool = False,
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
        task: What the outputs are: "classification", class scores (images, classes); "segmentation", class scores of
            pixels (images, classes, height, width); "detection", boxes as torchvision's detectors return them;
            "regression", anything else. By default it is told from the first outputs if there is no doubt.
        classes: For data with only some of the model's classes, the model's output for each label. All outputs still
            compete.
        min_score: For detection, the lowest score of boxes that count. Default: 0.0.
        per_layer: Also measure what is lost when each layer alone is masked (`Evaluation.layers`); the model runs once
            more for every masked layer. Default: False.
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
    _check_options(task, min_score)
    check_initialised(model)
    if masks is not None:
        if dense is not None:
            raise OptionError("evaluate accepts masks or dense=, not both: with masks, `model` is the dense one")
        check_dense(model, masks)
        dense, subject = model, apply(model, masks, on_changed=on_changed).eval()
    else:
        subject = clone(model).eval()
    reference = None if dense is None else clone(unwrapped(dense)).eval()
    if per_layer and masks is None:
        raise OptionError("per_layer=True needs masks: it measures what each of them costs")
    losses = LayerLosses(model, masks, forward) if per_layer and masks is not None else None
    count = None
    with torch.no_grad():
        for index, batch in enumerate(iterate(data, progress, "images")):
            result = result_of(subject, batch, forward)
            task = task or _task_of(result, batch, type(model).__name__)
            count = count or _count_of(task, classes, min_score, forward)
            read: Callable[..., Any] = detections_of if task == "detection" else tensor_of
            output, against = read(result, index, "masked " if masks is not None else ""), None
            if reference is not None:
                against = read(result_of(reference, batch, forward), index, "dense ")
                _check_same_shape(output, against)
            count.add(output, against, batch, index)
            if losses is not None:
                losses.add(against, batch, index, read, partial(_count_of, task, classes, min_score, forward))
    assert count is not None  # `iterate` raises if there are no batches
    assert task is not None
    return Evaluation(task=task, **count.shares(), layers=None if losses is None else losses.losses())


def _check_same_shape(output: Any, against: Any) -> None:
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else (len(one),) for one in (output, against)]
    if shapes[0] != shapes[1]:
        raise ModelError(f"the model returned outputs of shape {shapes[0]}, but the dense model {shapes[1]}")


def _check_options(task: Any, min_score: Any) -> None:
    if task is not None and task not in get_args(Task):
        raise OptionError(f"task must be one of {listed(get_args(Task))}, got {task!r}")
    if not isinstance(min_score, int | float) or not 0 <= min_score <= 1:
        raise OptionError(f"min_score must be between 0 and 1, got {min_score!r}")


def _task_of(result: Any, batch: Any, model: str) -> Task:
    """What the outputs of a model are, if there is no doubt."""
    if is_detections(result):
        return "detection"
    output = main_output(result)
    if output.is_floating_point() and output.dim() == 2 and output.shape[1] > 1:
        return "classification"
    if output.is_floating_point() and output.dim() == 4 and output.shape[1] > 1:
        named = isinstance(result, Mapping) and isinstance(result.get("out"), Tensor)  # as in torchvision
        if named or pixel_labels_of(batch) is not None:
            return "segmentation"
    raise ModelError(
        f"{model} returned {output.dtype} outputs of shape {tuple(output.shape)}, which may not be class scores; "
        f"pass task='segmentation' for class scores of pixels, task='regression' for other numbers, or forward= to "
        f"select or reduce them"
    )


def _count_of(
    task: Task, classes: Sequence[int] | None, min_score: float, forward: Forward | None
) -> ClassificationCount | SegmentationCount | DetectionCount | RegressionCount:
    if task == "classification":
        return ClassificationCount(classes, forward)
    if classes is not None:
        raise OptionError(f"classes= is for class scores of images, and cannot be combined with task={task!r}")
    if task == "segmentation":
        return SegmentationCount()
    return DetectionCount(min_score) if task == "detection" else RegressionCount()
