"""Trade accuracy against speed: leave the layers dense whose masks cost most for what they save."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from halve.agreement import compare, correct
from halve.batches import Forward, Progress, iterate, labels_of, reiterable, tracked
from halve.errors import DataError, LearningWarning, ModelError, OptionError, listed, warn
from halve.learn.held_back import Split
from halve.learn.learner import Runner
from halve.masks.corrections import corrected
from halve.masks.mask import MaskSet
from halve.modules import clone, plain_weight_, weight_name, weight_of
from halve.select.select import SelectOptions
from halve.select.speed_plan import SpeedPlan, plan_of

Metric = Literal["agreement", "top1"]


@dataclass(frozen=True)
class Trade:
    """An accuracy budget or a speed target: one of `max_drop` and `min_speedup`, and what it is measured on.

    `held_back` says whether these are the images by which masks are judged too, and `images` how many they are, if that
    is known before they are read.
    """

    max_drop: float | None
    min_speedup: float | None
    data: Any
    metric: Metric
    plan: SpeedPlan | None
    held_back: bool = False
    images: int | None = None

    @classmethod
    def of(
        cls, max_drop: float | None, min_speedup: float | None, data: Any, metric: Metric, selection: SelectOptions
    ) -> "Trade | None":
        """What the options of `learn` ask for; None if that is nothing. Raises for what is not allowed."""
        plan = selection.get("plan")
        if max_drop is None and min_speedup is None:
            if data is not None:
                raise OptionError("drop_data= needs max_drop= or min_speedup=: the drop is measured for these")
            return None
        if max_drop is not None and min_speedup is not None:
            raise OptionError("give max_drop= or min_speedup=, not both")
        if max_drop is not None:
            check_accuracy_budget(max_drop, metric)
        if min_speedup is not None:
            check_speed_target(min_speedup)
            if plan is None:
                raise OptionError("min_speedup= needs plan=, what 'halve.measure' found on the target")
        speeds = None if plan is None else plan_of(plan)
        if min_speedup is not None and speeds is not None and (without := speeds.speedup(())) >= min_speedup:
            raise OptionError(
                f"min_speedup={min_speedup:g} needs no masks: compiled without them the network is {without:.2f} x as "
                f"fast as dense on {speeds.device}; ask for more, or run halve.compile(model, None, images)"
            )
        return cls(max_drop, min_speedup, data, metric, speeds)

    def check_reachable(self, layers: Sequence[str]) -> None:
        """Raise `OptionError` if masks in all of these layers are slower than the target, before they are learned."""
        if self.min_speedup is None or self.plan is None or self.plan.speedup(layers) >= self.min_speedup:
            return
        other = [name for name in self.plan.faster if name not in layers]
        more = f"; the plan leaves {listed(other)} dense, also= masks them" if other else ""
        raise OptionError(
            f"min_speedup={self.min_speedup:g} is out of reach: masks in all {len(layers)} layers give "
            f"{self.plan.speedup(layers):.2f} x on {self.plan.device}, {self.plan.dtype}, batch {self.plan.batch}{more}"
        )

    def on(self, split: Split) -> "Trade":
        """Measured on the images that are held back, unless others were given."""
        if self.data is not None:
            return self
        if not split.source:
            option = "max_drop" if self.max_drop is not None else "min_speedup"
            raise DataError(f"{option}= needs images to measure the drop on: {split.reason}; pass drop_data=")
        return replace(self, data=split.held_back, held_back=True, images=split.images or None)

    def reread(self) -> "Trade":
        """The same with data that can be read more than once: an iterator becomes a list."""
        return replace(self, data=reiterable(self.data))

    def enforced(
        self, model: nn.Module, masks: MaskSet, forward: Forward | None, progress: Progress | None, warns: bool
    ) -> MaskSet:
        """The masks that are kept. Warns, if asked to, of too few images, unless their number was known before."""
        if self.max_drop is not None:
            return enforce_accuracy_budget(
                *(model, masks, self.data, self.max_drop, self.metric),
                plan=self.plan,
                forward=forward,
                progress=progress,
                warns=warns and self.images is None,
            )
        assert self.min_speedup is not None
        assert self.plan is not None
        return enforce_speed_target(
            *(model, masks, self.data, self.min_speedup, self.plan), forward=forward, progress=progress
        )

    def drop(self, model: nn.Module, masks: MaskSet, forward: Forward | None) -> float:
        """What the masks cost, by the metric."""
        metric = self.metric if self.max_drop is not None else "agreement"
        return _Runs(model, masks, self.data, metric, forward).drop(list(masks))


def enforce_accuracy_budget(
    model: nn.Module,
    masks: MaskSet,
    data: Any,
    max_drop: float,
    metric: Metric = "agreement",
    *,
    plan: SpeedPlan | None = None,
    forward: Forward | None = None,
    progress: Progress | None = None,
    warns: bool = True,
) -> MaskSet:
    """Return the masks without those that cost most, leaving as few layers dense as the budget requires.

    A layer's cost is the mean KL divergence of the outputs when it alone is masked. With a plan, the layers that save
    the fewest milliseconds for their cost are left dense first. The recipe lists the layers left dense with their
    costs, the drop before and after, and the number of images.

    Args:
        model: The dense model.
        masks: Its masks.
        data: Batches on which the drop is measured.
        max_drop: Largest allowed drop of the metric, from 0 to 1.
        metric: "agreement" with the dense model, or "top1" accuracy, which needs labels. Default: "agreement".
        plan: What each mask saves, from `halve.measure`. Default: all masks are worth the same.
        forward: Runs the model on an unusual batch.
        progress: Wraps loops that take long.
        warns: Whether to warn if there are too few images for the budget. Default: True.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    >>> masks = enforce_accuracy_budget(model, halve.prune(model, "random"), torch.randn(256, 8), max_drop=0.25)
    >>> masks.recipe["drop"] <= 0.25
    True
    """
    check_accuracy_budget(max_drop, metric)
    runs = _Runs(model, masks, data, metric, forward)
    if warns:
        warn_if_coarse(max_drop, runs.images)
    everything = runs.drop(list(masks))
    costs: dict[str, float] = {}
    dense: list[str] = []
    drop = everything
    if everything > max_drop:
        costs = runs.costs(progress)
        order = by_worth(costs, plan)
        low, high = 1, len(order)  # more dense layers, less drop; with all of them dense it is zero
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if runs.drop(order[middle:]) <= max_drop else (middle + 1, high)
        while low < len(order) and runs.drop(order[low:]) > max_drop:
            low += 1  # the drop is not strictly monotonic
        kept, dense = order[low:], order[:low]
        for name in reversed(order[:low]):  # what fits into the rest of the budget
            if runs.drop([*kept, name]) <= max_drop:
                kept.append(name)
                dense.remove(name)
        drop = runs.drop(kept)
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
        drop_images=runs.images,
        left_dense={name: costs[name] for name in dense},
    )


def enforce_speed_target(
    model: nn.Module,
    masks: MaskSet,
    data: Any,
    min_speedup: float,
    plan: SpeedPlan,
    *,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> MaskSet:
    """Return as few of the masks as give this speed-up, those that save the most milliseconds for their cost.

    Args:
        model: The dense model.
        masks: Its masks.
        data: Batches on which the cost of each mask is measured, as for `enforce_accuracy_budget`.
        min_speedup: Speed relative to the dense network, as the plan estimates it, such as 1.5.
        plan: What each mask saves, from `halve.measure`.
        forward: Runs the model on an unusual batch.
        progress: Wraps loops that take long.
    """
    check_speed_target(min_speedup)
    most = plan.speedup(masks)
    if most < min_speedup:
        raise ModelError(
            f"min_speedup={min_speedup:g} is out of reach: all {len(masks)} masks together give {most:.2f} x "
            f"on {plan.device}, {plan.dtype}, batch {plan.batch}"
        )
    runs = _Runs(model, masks, data, "agreement", forward)
    everything = runs.drop(list(masks))
    costs = runs.costs(progress)
    dense: list[str] = []
    order = by_worth(costs, plan)
    for name in order:  # a layer that saves too much to be left dense does not keep later ones from it
        rest = [other for other in order if other not in (*dense, name)]
        if rest and plan.speedup(rest) >= min_speedup:
            dense.append(name)
    left = [name for name in order if name not in dense]
    return masks.without(dense).with_recipe(
        min_speedup=min_speedup,
        drop_metric="agreement",
        drop_before=everything,
        drop=runs.drop(left),
        drop_images=runs.images,
        left_dense={name: costs[name] for name in dense},
    )


def costs_of(
    model: nn.Module, masks: MaskSet, data: Any, *, forward: Forward | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """What each mask costs: the mean KL divergence of the outputs from the dense model's when it alone is applied."""
    return _Runs(model, masks, data, "agreement", forward).costs(progress)


def by_worth(costs: Mapping[str, float], plan: SpeedPlan | None) -> list[str]:
    """Layers by what a mask is worth, least first: milliseconds saved for its cost, or just the least cost."""
    if plan is None:
        return sorted(costs, key=lambda name: -costs[name])
    saved = {name: plan[name].saved_ms if name in plan else 0.0 for name in costs}
    return sorted(costs, key=lambda name: (saved[name] / max(costs[name], 1e-12), -costs[name]))


def check_accuracy_budget(max_drop: float, metric: str) -> None:
    """Raise `OptionError` for a budget or a metric that is not allowed."""
    if metric not in get_args(Metric):
        raise OptionError(f"drop_metric must be one of {listed(get_args(Metric))}, got {metric!r}")
    if not 0 <= max_drop <= 1:
        raise OptionError(f"max_drop must be between 0 and 1, got {max_drop}")


def warn_if_coarse(max_drop: float, images: int) -> None:
    """Warn if a single one of so many images is more than the budget allows; a budget of 0 is exact on any number."""
    if max_drop and 1 / images > max_drop:
        warn(
            f"max_drop={max_drop:g} on {images} images allows no change at all, since one of them is "
            f"{100 / images:.1f} %, and says little about others: it takes {math.ceil(1 / max_drop)} images or more; "
            f"pass them with drop_data=",
            LearningWarning,
        )


def check_speed_target(min_speedup: float) -> None:
    """Raise `OptionError` for a speed-up that is none."""
    if not 1 <= min_speedup < math.inf:
        raise OptionError(f"min_speedup must be at least 1, such as 1.5, got {min_speedup}")


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
        own = self._model.own
        self._corrected = {name: corrected(own(name), pair) for name, pair in masks.corrections.items()}
        self._data = reiterable(data)
        self._dense = self._outputs([])
        self.images = len(self._dense)
        self._labels = self._dense.argmax(1)
        if metric == "top1":
            labels = [labels_of(batch) for batch in iterate(self._data)]
            if any(label is None for label in labels):
                raise DataError("drop_metric='top1' needs labels in drop_data; use 'agreement' for data without labels")
            self._labels = torch.cat([label for label in labels if label is not None]).to(self._labels.device)
        self._best = self._share_correct(self._dense)

    def drop(self, names: Sequence[str]) -> float:
        """Drop of the metric with these layers masked, and norms corrected as the masks ask for."""
        return self._best - self._share_correct(self._outputs(names, with_norms=bool(names)))

    def costs(self, progress: Progress | None) -> dict[str, float]:
        """Mean KL divergence of the outputs with each layer alone masked, and no norm corrected."""
        return {
            name: compare(self._outputs([name]), self._dense).kl
            for name in tracked(list(self._masked), progress, "cost of each layer")
        }

    def _share_correct(self, outputs: Tensor) -> float:
        return correct(outputs, self._labels) / len(outputs)

    @torch.no_grad()
    def _outputs(self, names: Sequence[str], with_norms: bool = False) -> Tensor:
        tensors = {weight_name(name): self._masked[name] for name in names} | (self._corrected if with_norms else {})
        outputs = [self._model.with_tensors(tensors, batch) for batch in iterate(self._data)]
        if outputs[0].dim() != 2:
            raise ModelError(
                f"max_drop= needs outputs of shape (images, classes), got {tuple(outputs[0].shape)}; "
                f"pass forward= to reduce them"
            )
        return torch.cat(outputs).float()
