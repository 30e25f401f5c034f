"""Where learning starts: scores of the weights, channel orders in which blocks keep more of them, the first logits."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress
from halve.errors import MaskError, OptionError, first_line, listed
from halve.learn.sampling import Sampler, glorot
from halve.learn.settings import Settings
from halve.masks.apply import check_dense, check_fit
from halve.masks.mask import MaskSet
from halve.masks.moves import Moves
from halve.permute.permute import Permutation, permute
from halve.permute.policy import orders_of
from halve.prune.score import LayerScores, Score, ScoreFunction, ScoreInputs
from halve.prune.scores import SCORES, score_of
from halve.select.select import NOT_INCLUDED, Choice, SelectOptions, masked_weights, select

_LEAD = 8  # the lead of a mask to start from is alpha over this
_NAMING = ("include", "exclude", "also")  # options of `select` that name layers
Start = str | ScoreFunction | MaskSet


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
    not_masked: Mapping[str, str] = field(default_factory=dict)  # why the other layers are not masked
    selection: SelectOptions = field(default_factory=SelectOptions)  # the options that they were selected by


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


def layers_of(masks: MaskSet) -> SelectOptions:
    """The options of `select` that choose the layers of these masks, and no others."""
    names = [glob.escape(name) for name in masks]
    return SelectOptions(include=names, also=names)


def select_layers(
    model: nn.Module,
    selection: SelectOptions,
    batch: Any = None,
    forward: Forward | None = None,
    start: Start = "magnitude",
) -> Layers:
    """Select the layers to mask, of those that run on the batch if there is one.

    Masks to start from select their own layers, and a plan those of them where a mask pays, unless the options name
    others. Raises `ModelError` if there are none or if a weight is not finite.
    """
    masks = start if isinstance(start, MaskSet) and all(selection.get(name) is None for name in _NAMING) else None
    if masks is not None:
        check_fit(model, masks)
        only = layers_of(masks)
        filtered = any(selection.get(name) is not None for name in ("plan", "kinds"))
        selection = {**selection, **({"include": only["include"]} if filtered else only)}
    chosen = select(model, **selection, data=None if batch is None else [batch], forward=forward)
    reasons = chosen.not_masked
    if masks is not None:
        reasons = {name: "not masked by start=" if why == NOT_INCLUDED else why for name, why in reasons.items()}
    return Layers(chosen.masked, masked_weights(model, chosen), reasons, selection)


def check_start(start: Start) -> None:
    """Raise `OptionError` for a start that does not exist."""
    if not (callable(start) or isinstance(start, MaskSet) or start == "glorot" or start in SCORES):
        names = listed([*SCORES, "glorot"])
        raise OptionError(f"unknown start {start!r}; use {names}, a MaskSet or a score function")


def reads_data(start: Start) -> bool:
    """Whether the scores of the start are measured on data."""
    score = _score_of(start)
    return score is not None and score.needs_data


def initial_scores(inputs: Inputs, layers: Layers, settings: Settings, search: Search | None) -> LayerScores | None:
    """Score the weights: by the score of the start, or by the one that channel orders are searched by.

    Masks and random logits need no scores.
    """
    score = _score_of(settings.start)
    if isinstance(settings.start, MaskSet) or (score is None and search is None):
        return None
    by = score if score is not None and search is None else _searched_by(settings.start)
    # Also in a resumed run that needs no scores: a seeded loader counts how often it was iterated over.
    return _compute(by, inputs, layers.choices, layers.weights, settings.seed)


def order_channels(
    inputs: Inputs, layers: Layers, settings: Settings, search: Search | None, found: LayerScores | None
) -> ChannelOrders:
    """Find channel orders in which the blocks keep more of their scores; masks to start from bring their own."""
    if isinstance(settings.start, MaskSet):
        check_dense(inputs.model, settings.start)
        return ChannelOrders(orders_of(settings.start, layers.choices))
    if search is None:
        return ChannelOrders()
    if search.known is not None:
        if "reason" in search.known:
            return ChannelOrders(reason=str(search.known["reason"]))
        return ChannelOrders(Permutation.restored(layers.choices, search.known))
    assert found is not None
    try:
        permutation = permute(
            *(inputs.model, layers.choices, _searched_by(settings.start).for_search(found), search.example),
            seconds=search.seconds,
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
    inputs: Inputs,
    layers: Layers,
    settings: Settings,
    orders: ChannelOrders,
    search: Search | None,
    found: LayerScores | None,
) -> Sampler:
    """Return a sampler whose logits favour what the start keeps, in the given channel orders."""
    start, weights, choices = settings.start, layers.weights, orders.choices(layers)
    if isinstance(start, MaskSet):
        return _near(_kept(start, choices, weights), choices, weights, settings.alpha)
    score = _score_of(start)
    if score is None:
        return _random_sampler(choices, weights, settings.seed)
    if found is None or (search is not None and score.search_score is not None):  # orders were searched by another
        found = _compute(score, inputs, choices, weights, settings.seed)
    here = {name: value.to(weights[name].device) for name, value in found.by_layer.items()}
    if score.whole_masks:
        return _near(here, choices, weights, settings.alpha)
    return Sampler(choices, weights, here, settings.alpha)


def _near(
    kept: Mapping[str, Tensor], choices: Sequence[Choice], weights: Mapping[str, Tensor], alpha: float
) -> Sampler:
    """A sampler that starts at a mask, 1 for what it keeps: its codes are a little ahead of what the magnitudes favour.

    A mask alone says nothing about which of the other codes is the next best, and each would have to catch up with an
    equal lead: in a short run none does.
    """
    sampler = Sampler(choices, weights, {name: weight.abs() for name, weight in weights.items()}, alpha)
    sampler.favour_(kept, alpha / _LEAD)
    return sampler


def _score_of(start: Start) -> Score | None:
    """The score that a run starts from; None for masks and for random logits."""
    return None if isinstance(start, MaskSet) or start == "glorot" else score_of(start)


def _searched_by(start: Start) -> Score:
    """The score that channel orders are searched by: one that scores each weight on its own."""
    score = _score_of(start) or SCORES["magnitude"]
    return score.search_score or score


def _compute(
    score: Score, inputs: Inputs, choices: Sequence[Choice], weights: Mapping[str, Tensor], seed: int
) -> LayerScores:
    return score.compute(
        ScoreInputs(
            *(inputs.model, choices, weights, inputs.data), seed=seed, forward=inputs.forward, progress=inputs.progress
        )
    )


def _random_sampler(choices: Sequence[Choice], weights: Mapping[str, Tensor], seed: int) -> Sampler:
    sampler = Sampler(choices, weights, {name: torch.zeros_like(w) for name, w in weights.items()}, 0.0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for logits in sampler.split(sampler.logits):
            logits += glorot((logits.shape[0], logits.shape[1]), generator).to(logits)
    return sampler


def _kept(masks: MaskSet, choices: Sequence[Choice], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """1 where the masks keep, 0 elsewhere."""
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
