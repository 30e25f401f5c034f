"""An accuracy budget: leave layers dense until the masked network drops by no more than allowed."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from halve.agreement import compare, correct
from halve.batches import Forward, Progress, iterate, labels_of, reiterable, tracked
from halve.errors import DataError, ModelError, OptionError, listed
from halve.learn.learner import Runner
from halve.masks.mask import MaskSet
from halve.modules import clone, plain_weight_, weight_of

Metric = Literal["agreement", "top1"]


def enforce_accuracy_budget(
    model: nn.Module,
    masks: MaskSet,
    data: Any,
    max_drop: float,
    metric: Metric = "agreement",
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> MaskSet:
    """Return the masks without those that cost most, leaving as few layers dense as the budget requires.

    A layer's cost is the mean KL divergence of the outputs when it alone is masked. The recipe lists the layers left
    dense with their costs, and the drop before and after.

    Args:
        model: The dense model.
        masks: Its masks.
        data: Batches on which the drop is measured.
        max_drop: Largest allowed drop of the metric, from 0 to 1.
        metric: "agreement" with the dense model, or "top1" accuracy, which needs labels. Default: "agreement".
        forward: Runs the model on an unusual batch.
        progress: Wraps loops that take long.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    >>> masks = enforce_accuracy_budget(model, halve.prune(model, "random"), torch.randn(256, 8), max_drop=0.25)
    >>> masks.recipe["drop"] <= 0.25
    True
    """
    check_accuracy_budget(max_drop, metric)
    runs = _Runs(model, masks, data, metric, forward)
    everything = runs.drop(list(masks))
    costs: dict[str, float] = {}
    dense: list[str] = []
    drop = everything
    if everything > max_drop:
        costs = {name: runs.cost(name) for name in tracked(list(masks), progress, "cost of each layer")}
        order = sorted(masks, key=lambda name: -costs[name])
        low, high = 1, len(order)  # more dense layers, less drop; with all of them dense it is zero
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if runs.drop(order[middle:]) <= max_drop else (middle + 1, high)
        while low < len(order) and runs.drop(order[low:]) > max_drop:
            low += 1  # the drop is not strictly monotonic
        dense, drop = order[:low], runs.drop(order[low:])
    if len(dense) == len(masks):
        raise ModelError(
            f"no layer can be masked within max_drop={max_drop}: with all masks the drop is {everything:.4f}; "
            f"allow a larger drop, or learn longer"
        )
    return masks.without(dense).with_recipe(
        max_drop=max_drop,
        drop_metric=metric,
        drop_before=everything,
        drop=drop,
        left_dense={name: costs[name] for name in dense},
    )


def check_accuracy_budget(max_drop: float, metric: str) -> None:
    """Raise `OptionError` for a budget or a metric that is not allowed."""
    if metric not in get_args(Metric):
        raise OptionError(f"drop_metric must be one of {listed(get_args(Metric))}, got {metric!r}")
    if not 0 <= max_drop <= 1:
        raise OptionError(f"max_drop must be between 0 and 1, got {max_drop}")


class _Runs:
    """Runs a copy of the model with some of the masks applied, over the same batches."""

    def __init__(self, model: nn.Module, masks: MaskSet, data: Any, metric: Metric, forward: Forward | None) -> None:
        self._model = Runner(clone(model).eval(), forward)
        self._masked = {}
        for name, mask in masks.items():
            layer = self._model.inner.get_submodule(name)
            weight = weight_of(layer)
            plain_weight_(layer)
            self._masked[name] = mask.apply_to(weight)
        self._data = reiterable(data)
        self._dense = self._outputs([])
        self._labels = self._dense.argmax(1)
        if metric == "top1":
            labels = [labels_of(batch) for batch in iterate(self._data)]
            if any(label is None for label in labels):
                raise DataError("drop_metric='top1' needs labels in drop_data; use 'agreement' for data without labels")
            self._labels = torch.cat([label for label in labels if label is not None]).to(self._labels.device)
        self._best = self._share_correct(self._dense)

    def drop(self, names: Sequence[str]) -> float:
        """Drop of the metric with these layers masked."""
        return self._best - self._share_correct(self._outputs(names))

    def cost(self, name: str) -> float:
        """Mean KL divergence of the outputs with this layer alone masked."""
        return compare(self._outputs([name]), self._dense).kl

    def _share_correct(self, outputs: Tensor) -> float:
        return correct(outputs, self._labels) / len(outputs)

    @torch.no_grad()
    def _outputs(self, names: Sequence[str]) -> Tensor:
        weights = {name: self._masked[name] for name in names}
        outputs = [self._model.with_weights(weights, batch) for batch in iterate(self._data)]
        if outputs[0].dim() != 2:
            raise ModelError(
                f"max_drop= needs outputs of shape (images, classes), got {tuple(outputs[0].shape)}; "
                f"pass forward= to reduce them"
            )
        return torch.cat(outputs).float()
