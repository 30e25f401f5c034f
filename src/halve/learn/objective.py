"""Objectives of learning: what is compared of the masked and the dense network."""

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
from halve.errors import DataError, ModelError, OptionError, listed

Match = Literal["auto", "outputs+features", "outputs", "features", "probabilities"]
FEATURE_WEIGHT = 10.0
OUTPUT_WEIGHT = 5.0
DEPTH = 1.0  # the last block counts exp(2 DEPTH) times as much as the first, whose errors later blocks can correct


@dataclass(frozen=True)
class Views:
    """What an objective sees of one step: the outputs and features of the masked and the dense network.

    >>> import halve
    >>> def squared(views: halve.Views) -> Tensor:
    ...     return (views.output - views.dense_output).square().mean()
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    >>> halve.learn(model, torch.randn(64, 8), objective=squared, steps=2, fallback=False)
    MaskSet(1 layer, 64 weights, 50.0 % kept)
    """

    output: Tensor
    features: list[Tensor]
    dense_output: Tensor | None
    dense_features: list[Tensor]
    batch: Any
    guidance: float | Tensor = 1.0  # from 1 at the start of a run to 0 at 80 % of it


Objective = Callable[[Views], Tensor]


def distill_outputs(views: Views) -> Tensor:
    """Mean over images of the relative squared error of the outputs.

    Class scores are centred first, since only their differences matter. All classes count equally, also those that the
    images do not show, so that the masks generalise to other images. The class axis is axis 1 of (n, classes) and
    (n, classes, height, width), and the last axis of (n, positions, classes).
    """
    ours, theirs = views.output.float(), _dense_output(views).float()
    axis = _class_axis(ours)
    if axis is not None:
        ours, theirs = (scores - scores.mean(axis, keepdim=True) for scores in (ours, theirs))
    return _output_error(ours, theirs)


def _output_error(ours: Tensor, theirs: Tensor) -> Tensor:
    difference, scale = ((x.flatten(1) if x.dim() > 1 else x[:, None]).square().sum(1) for x in (ours - theirs, theirs))
    return OUTPUT_WEIGHT * (difference / scale.clamp(min=1e-12)).mean()


def distill_probabilities(views: Views) -> Tensor:
    """Mean KL divergence of the masked network's class probabilities from the dense network's."""
    dense = _dense_output(views)
    axis = _class_axis(views.output)
    if axis is None:
        raise ModelError(
            f"match='probabilities' needs class scores, got outputs of shape {tuple(views.output.shape)}; "
            f"use match='outputs+features' for other outputs, or pass your own objective="
        )
    ours = views.output.float().log_softmax(axis)
    theirs = dense.float().log_softmax(axis)
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(axis).mean()


def _dense_output(views: Views) -> Tensor:
    assert views.dense_output is not None
    if views.output.shape != views.dense_output.shape:
        raise ModelError(
            f"the masked network returns outputs of shape {tuple(views.output.shape)}, the dense one "
            f"{tuple(views.dense_output.shape)}: use match='features', or a forward= whose outputs have equal shapes"
        )
    return views.dense_output


def _class_axis(output: Tensor) -> int | None:
    axis = 2 if output.dim() == 3 else 1
    return axis if output.dim() > 1 and output.shape[axis] > 1 else None


def distill_features(views: Views) -> Tensor:
    """Weighted mean over blocks of the relative squared error of their outputs; later blocks weigh more."""
    pairs = zip(views.features, views.dense_features, strict=True)
    errors: list[Tensor] = [_RelativeError.apply(ours, theirs) for ours, theirs in pairs]
    depths = [math.exp(2 * DEPTH * place / max(len(errors) - 1, 1)) for place in range(len(errors))]
    total = torch.stack([depth * error for depth, error in zip(depths, errors, strict=True)]).sum()
    return FEATURE_WEIGHT * total / sum(depths)


class _RelativeError(torch.autograd.Function):
    """||ours - theirs||^2 / ||theirs||^2 in fp32, without fp32 copies: features are the largest tensors of a step."""

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


def distill_outputs_and_features(views: Views) -> Tensor:
    """Outputs and features together. Outputs need not be class scores: an offset that all of them share counts, too."""
    return _output_error(views.output.float(), _dense_output(views).float()) + distill_features(views)


def distill_auto(views: Views) -> Tensor:
    """Outputs and features, replaced by probabilities along the run as far as the batch shows all classes.

    Features and scores lead to good masks quickly and from few images. Probabilities show which classes are confused,
    but say little about classes that are not in the batch. Only outputs of shape (n, classes) count as class scores.
    """
    guide = distill_outputs(views) + distill_features(views)
    if views.output.dim() != 2 or views.output.shape[1] < 2:
        return guide
    shown = _share_of_classes(_dense_output(views))
    return (1 - shown * (1 - views.guidance)) * guide + shown * distill_probabilities(views)


def _share_of_classes(output: Tensor) -> Tensor:
    """Share of the classes that are predicted for some image."""
    return torch.zeros(output.shape[1], device=output.device).index_fill(0, output.argmax(1), 1.0).mean()


DISTILLATIONS: dict[Objective, Match] = {
    distill_auto: "auto",
    distill_outputs_and_features: "outputs+features",
    distill_outputs: "outputs",
    distill_features: "features",
    distill_probabilities: "probabilities",
}


def task(views: Views) -> Tensor:
    """Cross-entropy with the labels."""
    labels = labels_of(views.batch)
    if labels is None:
        raise DataError("objective='task' needs labels, but the batches have none; objective='distill' needs no labels")
    if views.output.dim() != 2 or len(labels) != len(views.output):
        raise DataError(
            f"objective='task' needs one label per image, got {len(labels)} for outputs of shape "
            f"{tuple(views.output.shape)}"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= views.output.shape[1]:
        found, outputs = f"labels from {int(labels.min())} to {int(labels.max())}", views.output.shape[1]
        raise DataError(f"{found}, but the classifier has {outputs} outputs")
    return F.cross_entropy(views.output.float(), labels.to(views.output.device))


def find_blocks(model: nn.Module, masked: Collection[str]) -> list[str]:
    """Return the names of the repeated blocks of a network, or of its masked layers if it has none.

    A block is a module whose class occurs at least twice, that holds at least two masked layers, and that is neither a
    plain container nor inside another block. A module that holds several blocks of one class is a stage, not a block.

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
    """Return the names of the modules that match the given globs."""
    names = [name for name, _ in model.named_modules() if name]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise OptionError(f"features={glob!r} matches no module; the modules are {listed(names)}")
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


@contextmanager
def watching(model: nn.Module, names: Sequence[str]) -> Iterator[list[Tensor]]:
    """Collect the outputs of these modules during a forward pass, in the order in which they run."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(main_output(output))

    handles = [model.get_submodule(name).register_forward_hook(hook) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def resolve_objective(objective: str | Objective, match: Match) -> Objective:
    """Return the objective that the options name; a function is returned unchanged."""
    if callable(objective):
        return objective
    if objective == "task":
        return task
    if objective != "distill":
        raise OptionError(f"objective must be 'distill', 'task' or a function, got objective={objective!r}")
    known = {match: distillation for distillation, match in DISTILLATIONS.items()}
    if match not in known:
        raise OptionError(f"match must be one of {listed(known)}, got match={match!r}")
    return known[match]
