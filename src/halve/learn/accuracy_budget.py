"""An accuracy budget: which layers stay dense so that the masked network drops by no more than allowed."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress, iterate, labels_of, reiterable, tracked
from halve.errors import DataError, ModelError
from halve.learn.learner import Call
from halve.masks.mask import MaskSet
from halve.modules import clone, plain_weight_, weight_of

Metric = Literal["agreement", "top1"]


def keep_dense(
    model: nn.Module,
    masks: MaskSet,
    data: Any,
    max_drop: float,
    metric: Metric = "agreement",
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> MaskSet:
    """The masks without those layers that cost most, as few as it takes to stay within the budget.

    A layer's cost is the mean KL divergence of the outputs when it alone is masked. The recipe lists the layers that
    were left dense with their costs, and the drop before and after.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    >>> masks = keep_dense(model, halve.prune(model, "random"), torch.randn(256, 8), max_drop=0.25)
    >>> masks.recipe["drop"] <= 0.25
    True
    """
    check_budget(max_drop, metric)
    runs = _Runs(model, masks, data, metric, forward)
    everything = runs.drop(list(masks))
    costs: dict[str, float] = {}
    dense: list[str] = []
    drop = everything
    if everything > max_drop:
        costs = {name: runs.cost(name) for name in tracked(list(masks), progress, "cost of each layer")}
        order = sorted(masks, key=lambda name: -costs[name])
        low, high = 1, len(order)  # the drop falls with the number of dense layers; at the last it is zero
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if runs.drop(order[middle:]) <= max_drop else (middle + 1, high)
        while low < len(order) and runs.drop(order[low:]) > max_drop:
            low += 1  # it does not fall at every single step
        dense, drop = order[:low], runs.drop(order[low:])
    if len(dense) == len(masks):
        raise ModelError(
            f"no layer can be masked within max_drop={max_drop}: all of them together drop by {everything:.4f}"
        )
    return masks.without(dense).with_recipe(
        max_drop=max_drop,
        drop_metric=metric,
        drop_before=everything,
        drop=drop,
        left_dense={name: costs[name] for name in dense},
    )


def check_budget(max_drop: float, metric: str) -> None:
    """Raise for a budget that makes no sense."""
    if metric not in ("agreement", "top1"):
        raise ModelError(f"drop_metric={metric!r}: there are 'agreement' and 'top1'")
    if not 0 <= max_drop <= 1:
        raise ModelError(f"max_drop={max_drop}: it is a share, from 0 to 1")


class _Runs:
    """Runs a copy of the model with some of the masks on, over the same batches."""

    def __init__(self, model: nn.Module, masks: MaskSet, data: Any, metric: Metric, forward: Forward | None) -> None:
        self._model = Call(clone(model).eval(), forward)
        self._masked = {}
        for name, mask in masks.items():
            layer = self._model.inner.get_submodule(name)
            weight = weight_of(layer)
            plain_weight_(layer)
            self._masked[name] = mask.apply_to(weight)
        self._data = reiterable(data)
        self._dense = self._outputs([])
        self._truth = self._dense.argmax(1)
        if metric == "top1":
            labels = [labels_of(batch) for batch in iterate(self._data)]
            if any(label is None for label in labels):
                raise DataError("drop_metric='top1' needs labels in drop_data; 'agreement' needs none")
            self._truth = torch.cat([label for label in labels if label is not None]).to(self._truth.device)
        self._best = self._right(self._dense)

    def drop(self, names: Sequence[str]) -> float:
        """By how much the share of right answers falls with these layers masked."""
        return self._best - self._right(self._outputs(names))

    def cost(self, name: str) -> float:
        """Mean KL divergence of the outputs when this layer alone is masked."""
        theirs, ours = self._dense.log_softmax(1), self._outputs([name]).log_softmax(1)
        return float((theirs.exp() * (theirs - ours)).sum(1).mean())

    def _right(self, outputs: Tensor) -> float:
        return float((outputs.argmax(1) == self._truth).double().mean())

    @torch.no_grad()
    def _outputs(self, names: Sequence[str]) -> Tensor:
        weights = {name: self._masked[name] for name in names}
        outputs = [self._model.with_weights(weights, batch) for batch in iterate(self._data)]
        if outputs[0].dim() != 2:
            raise ModelError(
                f"a drop needs one row of class scores per image, not {tuple(outputs[0].shape)}; pass forward="
            )
        return torch.cat(outputs).float()
