"""What learning compares: outputs, features of blocks, labels."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.batches import labels_of, main_output
from halve.errors import DataError, ModelError, listed

Match = Literal["all", "both", "outputs", "features", "probabilities"]
FEATURE_WEIGHT = 10.0  # of the mean relative error of the features, beside that of the outputs
OUTPUT_WEIGHT = 5.0
DEPTH = (
    1.0  # the last block counts exp(2 DEPTH) times as much as the first: what is lost early can still be made up for
)


@dataclass(frozen=True)
class Views:
    """One step as an objective sees it: what the masked and the dense network made of a batch.

    >>> import halve
    >>> def squared(views: halve.Views) -> Tensor:
    ...     return (views.output - views.dense_output).square().mean()
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    >>> halve.learn(model, torch.randn(64, 8), objective=squared, steps=2)
    MaskSet(1 layer, 64 weights, 50.0 % kept)
    """

    output: Tensor
    features: list[Tensor]
    dense_output: Tensor | None
    dense_features: list[Tensor]
    batch: Any
    guidance: float | Tensor = 1.0  # from 1 at the start of a run to 0 at four fifths of it


Objective = Callable[[Views], Tensor]


def distill_outputs(views: Views) -> Tensor:
    """Mean over images of the relative squared error of the outputs.

    Class scores are compared less their mean, since only their differences count. All classes count alike, also those
    that the images do not show: that is what carries over to other images. Classes lie along axis 1 of outputs such as
    (n, classes) and (n, classes, height, width), along the last of (n, positions, classes).
    """
    theirs = _dense_output(views).float()
    ours = views.output.float()
    axis = _class_axis(ours)
    if axis is not None:
        ours, theirs = (scores - scores.mean(axis, keepdim=True) for scores in (ours, theirs))
    difference, scale = ((x.flatten(1) if x.dim() > 1 else x[:, None]).square().sum(1) for x in (ours - theirs, theirs))
    return OUTPUT_WEIGHT * (difference / scale.clamp(min=1e-12)).mean()


def distill_probabilities(views: Views) -> Tensor:
    """Mean KL divergence of the masked network's class probabilities from the dense network's."""
    dense = _dense_output(views)
    axis = _class_axis(views.output)
    if axis is None:
        raise ModelError(
            f"outputs of shape {tuple(views.output.shape)} are no class scores to compare: "
            f"match='both' compares outputs of any kind, or pass an objective of your own"
        )
    ours = views.output.float().log_softmax(axis)
    theirs = dense.float().log_softmax(axis)
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(axis).mean()


def _dense_output(views: Views) -> Tensor:
    assert views.dense_output is not None
    if views.output.shape != views.dense_output.shape:
        raise ModelError(
            f"the masked network gives outputs of shape {tuple(views.output.shape)}, the dense one "
            f"{tuple(views.dense_output.shape)}: match='features', or a forward= whose outputs can be compared"
        )
    return views.dense_output


def _class_axis(output: Tensor) -> int | None:
    axis = 2 if output.dim() == 3 else 1
    return axis if output.dim() > 1 and output.shape[axis] > 1 else None


def distill_features(views: Views) -> Tensor:
    """Mean over blocks of the relative squared error of their outputs, later blocks weighted more."""
    pairs = zip(views.features, views.dense_features, strict=True)
    errors: list[Tensor] = [_RelativeError.apply(ours, theirs) for ours, theirs in pairs]
    depths = [math.exp(2 * DEPTH * place / max(len(errors) - 1, 1)) for place in range(len(errors))]
    total = torch.stack([depth * error for depth, error in zip(depths, errors, strict=True)]).sum()
    return FEATURE_WEIGHT * total / sum(depths)


class _RelativeError(torch.autograd.Function):
    """||ours - theirs||^2 / ||theirs||^2, summed in fp32 without fp32 copies: features are a step's largest tensors."""

    @staticmethod
    def forward(ctx: Any, ours: Tensor, theirs: Tensor) -> Tensor:
        difference = ours - theirs
        scale = _squares(theirs).clamp(min=1e-12)
        ctx.save_for_backward(difference, scale)
        return _squares(difference) / scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        difference, scale = ctx.saved_tensors
        return difference * (2 * grads[0] / scale).to(difference.dtype), None


def _squares(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square()


def distill_both(views: Views) -> Tensor:
    """Outputs and features together."""
    return distill_outputs(views) + distill_features(views)


def distill_all(views: Views) -> Tensor:
    """Outputs and features, which give way to probabilities as far as the batch shows all classes.

    Features and scores lead to good masks quickly and from few images; where classes are confused is in the
    probabilities, but of classes that are not shown these say next to nothing. Outputs other than (n, classes) are not
    taken for class scores.
    """
    both = distill_both(views)
    if views.output.dim() != 2 or views.output.shape[1] < 2:
        return both
    shown = _share_of_classes(_dense_output(views))
    return (1 - shown * (1 - views.guidance)) * both + shown * distill_probabilities(views)


def _share_of_classes(output: Tensor) -> Tensor:
    """Of all classes, those that some image is taken for."""
    return torch.zeros(output.shape[1], device=output.device).index_fill(0, output.argmax(1), 1.0).mean()


DISTILLATIONS: dict[Objective, Match] = {
    distill_all: "all",
    distill_both: "both",
    distill_outputs: "outputs",
    distill_features: "features",
    distill_probabilities: "probabilities",
}


def task(views: Views) -> Tensor:
    """Cross-entropy with the labels."""
    labels = labels_of(views.batch)
    if labels is None:
        raise DataError("objective='task' needs labels, and the batches have none; 'distill' needs no labels")
    if views.output.dim() != 2 or len(labels) != len(views.output):
        raise DataError(
            f"{len(labels)} labels for outputs of shape {tuple(views.output.shape)}: one per image is needed"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= views.output.shape[1]:
        found, outputs = f"labels from {int(labels.min())} to {int(labels.max())}", views.output.shape[1]
        raise DataError(f"{found}, but the classifier has {outputs} outputs")
    return F.cross_entropy(views.output.float(), labels.to(views.output.device))


def find_blocks(model: nn.Module, masked: Collection[str]) -> list[str]:
    """Modules whose outputs are worth matching: the repeated blocks of a network, or its masked layers if it has none.

    A block is a module of a class that occurs at least twice, holds at least two masked layers, is no mere container,
    and lies in no other block. A module that holds several blocks of one class is a stage, not a block.

    >>> from torchvision.models import resnet18
    >>> model = resnet18()
    >>> masked = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    >>> find_blocks(model, masked)[:3]
    ['layer1.0', 'layer1.1', 'layer2.0']
    """
    modules = dict(model.named_modules())
    kinds = Counter(type(module) for module in modules.values())

    def inside(name: str, names: Collection[str]) -> list[str]:
        return [other for other in names if other.startswith(f"{name}.")]

    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    candidates = {
        name: type(module)
        for name, module in modules.items()
        if name and kinds[type(module)] > 1 and not isinstance(module, containers) and len(inside(name, masked)) > 1
    }
    blocks: list[str] = []
    for name in candidates:
        repeated = Counter(candidates[other] for other in inside(name, candidates))
        if max(repeated.values(), default=0) < 2 and not any(name.startswith(f"{block}.") for block in blocks):
            blocks.append(name)
    return blocks or list(masked)


def named_blocks(model: nn.Module, globs: Sequence[str]) -> list[str]:
    """The modules that the user named."""
    names = [name for name, _ in model.named_modules() if name]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ModelError(f"features: {glob!r} matches no module; there are {listed(names)}")
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


@contextmanager
def watching(model: nn.Module, names: Sequence[str]) -> Iterator[list[Tensor]]:
    """The outputs of these modules during one forward pass, in the order in which they ran."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(main_output(output))

    handles = [model.get_submodule(name).register_forward_hook(hook) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def objective_named(name: str | Objective, match: Match) -> Objective:
    """'distill' by what is matched, 'task', or the user's own."""
    if callable(name):
        return name
    known = {match: objective for objective, match in DISTILLATIONS.items()}
    if name == "task":
        return task
    if name != "distill" or match not in known:
        raise ModelError(
            f"objective={name!r}, match={match!r}: there are 'distill' (all, both, outputs, features, probabilities) "
            f"and 'task'"
        )
    return known[match]
