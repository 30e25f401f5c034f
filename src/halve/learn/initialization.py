"""Where learning starts: scores of the weights, channel orders in which blocks keep more of them, the first logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress
from halve.errors import MaskError, OptionError, first_line, listed
from halve.learn.sampling import Sampler, glorot
from halve.learn.settings import Settings
from halve.masks.mask import MaskSet
from halve.masks.moves import Moves
from halve.permute.permute import Permutation
from halve.permute.policy import graded_by, orders_of, reordered
from halve.prune import scores
from halve.prune.prune import ScoreFunction, check_something_masked, finite_weight, score_layers
from halve.select.select import Choice, SelectOptions, select

Scores = dict[str, Tensor]  # of the weights' shapes, by layer name


@dataclass(frozen=True)
class Inputs:
    """What every step reads: the model, the data, and how to run one on the other."""

    model: nn.Module
    data: Any
    forward: Forward | None = None
    progress: Progress | None = None


@dataclass(frozen=True)
class Layers:
    """The layers that are masked, with their dense weights."""

    choices: Sequence[Choice]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Search:
    """A search for channel orders.

    If it is not `required`, whatever goes wrong is a reason to do without. `known` is what a resumed run found.
    """

    example: Any
    seconds: float
    required: bool = False
    known: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ChannelOrders:
    """Channel orders of the layers: those that were found, or the reason why there are none."""

    permutation: Permutation | None = None
    reason: str = ""

    def choices(self, layers: Layers) -> Sequence[Choice]:
        """The layers, with their channel orders."""
        return self.permutation.choices if self.permutation else layers.choices

    @property
    def moves(self) -> Moves:
        """How the model's channels move."""
        return self.permutation.moves if self.permutation else {}

    def recipe(self) -> dict[str, Any]:
        """What masks remember of the orders."""
        summary = self.permutation.summary if self.permutation else None
        return {"permute": summary} | ({"not_permuted": self.reason} if self.reason else {})

    def state(self) -> dict[str, Any] | None:
        """The orders as plain JSON values, for the run state; None if no search was made."""
        if self.permutation is not None:
            return self.permutation.plain()
        return {"reason": self.reason} if self.reason else None


def select_layers(model: nn.Module, selection: SelectOptions) -> Layers:
    """Select the layers to mask; raises `ModelError` if there are none or if a weight is not finite."""
    chosen = select(model, **selection)
    check_something_masked(chosen)
    return Layers(chosen.masked, {choice.name: finite_weight(choice.name, model) for choice in chosen.masked})


def check_start(start: str | ScoreFunction | MaskSet) -> None:
    """Raise `OptionError` for a start that does not exist."""
    if not (callable(start) or isinstance(start, MaskSet) or start == "glorot" or start in scores.SCORES):
        names = listed([*scores.SCORES, "glorot"])
        raise OptionError(f"unknown start {start!r}; use {names}, a MaskSet or a score function")


def reads_data(start: str | ScoreFunction | MaskSet) -> bool:
    """Whether the scores of the start are measured on data."""
    return isinstance(start, str) and start in scores.NEEDS_DATA


def initial_scores(inputs: Inputs, layers: Layers, settings: Settings, search: Search | None) -> Scores:
    """Score the weights: by the score of the start, or by the one that channel orders are searched by.

    Masks and random logits need no scores.
    """
    if isinstance(settings.start, MaskSet) or (settings.start == "glorot" and search is None):
        return {}
    by = settings.start if search is None else graded_by(settings.start)
    # Also in a resumed run that needs no scores: a seeded loader counts how often it was iterated over.
    return _score(inputs, layers.choices, layers.weights, by, settings.seed)


def order_channels(
    inputs: Inputs, layers: Layers, settings: Settings, search: Search | None, found: Scores
) -> ChannelOrders:
    """Find channel orders in which the blocks keep more of their scores; masks to start from bring their own."""
    if isinstance(settings.start, MaskSet):
        return ChannelOrders(orders_of(settings.start, layers.choices))
    if search is None:
        return ChannelOrders()
    if search.known is not None:
        if "reason" in search.known:
            return ChannelOrders(reason=str(search.known["reason"]))
        return ChannelOrders(Permutation.restored(layers.choices, search.known))
    by = graded_by(settings.start)
    try:
        permutation = reordered(
            *(inputs.model, layers.choices, by, found, search.example, search.seconds),
            seed=settings.seed,
            forward=inputs.forward,
            progress=inputs.progress,
        )
    except Exception as error:  # capturing runs the model's own code, also on noise, which may raise anything
        if search.required:
            raise
        return ChannelOrders(reason=first_line(error))
    return ChannelOrders(permutation)


def initial_sampler(
    inputs: Inputs, layers: Layers, settings: Settings, orders: ChannelOrders, search: Search | None, found: Scores
) -> Sampler:
    """Return a sampler whose logits favour what the start keeps, in the given channel orders."""
    start, weights, choices = settings.start, layers.weights, orders.choices(layers)
    if isinstance(start, MaskSet):
        return Sampler(choices, weights, _kept(start, choices, weights), settings.alpha / 4)
    if start == "glorot":
        return _random_sampler(choices, weights, settings.seed)
    if search is not None and graded_by(start) != start:  # the orders were searched by another score
        found = _score(inputs, choices, weights, start, settings.seed)
    sharpness = settings.alpha / 4 if isinstance(start, str) and start in scores.WHOLE_MASKS else settings.alpha
    here = {name: score.to(weights[name].device) for name, score in found.items()}
    return Sampler(choices, weights, here, sharpness)


def _score(
    inputs: Inputs, choices: Sequence[Choice], weights: Mapping[str, Tensor], by: str | ScoreFunction, seed: int
) -> Scores:
    found, _ = score_layers(
        *(inputs.model, choices, weights, by, inputs.data), seed=seed, forward=inputs.forward, progress=inputs.progress
    )
    return found


def _random_sampler(choices: Sequence[Choice], weights: Mapping[str, Tensor], seed: int) -> Sampler:
    sampler = Sampler(choices, weights, {name: torch.zeros_like(w) for name, w in weights.items()}, 0.0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for logits in sampler.split(sampler.logits):
            logits += glorot((logits.shape[0], logits.shape[1]), generator).to(logits)
    return sampler


def _kept(masks: MaskSet, choices: Sequence[Choice], weights: Mapping[str, Tensor]) -> Scores:
    """1 where the masks keep, 0 elsewhere: a code's logit grows with its overlap with the mask."""
    result = {}
    for choice in choices:
        mask = masks.get(choice.name)
        if mask is None or mask.layout != choice.layout or mask.pattern != choice.pattern:
            raise MaskError(
                f"start= has no {choice.pattern} mask that fits layer {choice.name}: "
                f"select the layers that it masks (include=), with the same order= and pattern="
            )
        result[choice.name] = mask.kept().to(weights[choice.name])
    return result
