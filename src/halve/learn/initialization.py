"""Where learning starts: scores of the weights, channel orders in which blocks keep more of them, the first logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress
from halve.errors import ModelError, OptionError, first_line, listed
from halve.learn.sampling import Sampler, glorot
from halve.learn.settings import Settings
from halve.masks.mask import MaskSet
from halve.permute.permute import Permutation, permute
from halve.permute.policy import orders_of
from halve.prune.score import LayerScores, Score, ScoreInputs
from halve.prune.scores import SCORES, score_of
from halve.select.select import Choice


class Start:
    """What a run starts from, `settings.start`, for the layers that are masked."""

    def __init__(
        self,
        model: nn.Module,
        choices: Sequence[Choice],
        weights: dict[str, Tensor],
        settings: Settings,
        data: Any,
        forward: Forward | None = None,
        progress: Progress | None = None,
    ) -> None:
        start = settings.start
        known = callable(start) or isinstance(start, MaskSet) or start == "glorot" or start in SCORES
        if not known:
            raise OptionError(
                f"unknown start {start!r}; there are {listed(SCORES)}, glorot, a MaskSet, or a score function"
            )
        self._score = None if isinstance(start, MaskSet) or start == "glorot" else score_of(start)
        self.reads_data = self._score is not None and self._score.needs_data
        self._start, self._seed, self._alpha = start, settings.seed, settings.alpha
        self._model, self._choices, self._weights = model, choices, weights
        self._data, self._forward, self._progress = data, forward, progress
        self._found: LayerScores | None = None  # scores of the start itself, once they are known

    def own_orders(self) -> Permutation | None:
        """The channel orders that masks to start from bring along."""
        return orders_of(self._start, self._choices) if isinstance(self._start, MaskSet) else None

    def orders(
        self, example: Any, seconds: float, known: dict[str, Any] | None, asked: bool
    ) -> tuple[Permutation | None, str]:
        """Channel orders in which blocks keep more, and if there are none, why. `known` is what a checkpoint says.

        Where nobody asked for them, whatever goes wrong is a reason to do without.
        """
        assert not isinstance(self._start, MaskSet)
        score = self._score or SCORES["magnitude"]  # glorot has no scores
        by = score.search_score or score
        found = self._scores(by, self._choices)  # also when resumed: a seeded loader counts how often it was asked
        if by is self._score:
            self._found = found
        if known is not None and "left" in known:
            return None, str(known["left"])
        if known is not None:
            return Permutation.restored(self._choices, known), ""
        try:
            permutation = permute(
                *(self._model, self._choices, by.for_search(found), example),
                seconds=seconds,
                seed=self._seed,
                forward=self._forward,
                progress=self._progress,
            )
        except Exception as error:  # capturing runs the model's own code, also on noise, which may raise anything
            if asked:
                raise
            return None, first_line(error)
        return permutation, ""

    def sampler(self, choices: Sequence[Choice]) -> Sampler:
        """The logits at the start, for the choices with their channel orders."""
        start, weights = self._start, self._weights
        if isinstance(start, MaskSet):
            return Sampler(choices, weights, _scores_of(start, choices, weights), self._alpha / 4)
        if self._score is None:
            sampler = Sampler(choices, weights, {name: torch.zeros_like(w) for name, w in weights.items()}, 0.0)
            generator = torch.Generator().manual_seed(self._seed)
            with torch.no_grad():
                for logits in sampler.split(sampler.logits):
                    logits += glorot((logits.shape[0], logits.shape[1]), generator).to(logits)
            return sampler
        found, self._found = self._found, None  # as large as the weights: not for the whole run
        found = self._scores(self._score, choices) if found is None else found
        sharpness = self._alpha / 4 if self._score.whole_masks else self._alpha
        here = {name: score.to(weights[name].device) for name, score in found.by_layer.items()}
        return Sampler(choices, weights, here, sharpness)

    def _scores(self, score: Score, choices: Sequence[Choice]) -> LayerScores:
        model, weights, data = self._model, self._weights, self._data
        return score.compute(
            ScoreInputs(
                *(model, choices, weights, data), seed=self._seed, forward=self._forward, progress=self._progress
            )
        )


def _scores_of(masks: MaskSet, choices: Sequence[Choice], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """1 where the masks keep, 0 elsewhere: the logit of a code grows with what it shares with the mask."""
    result = {}
    for choice in choices:
        mask = masks.get(choice.name)
        if mask is None or mask.layout != choice.layout or mask.pattern != choice.pattern:
            raise ModelError(
                f"start= has no {choice.pattern} mask that fits layer {choice.name}: "
                f"learn the layers that it masks (include=), in the same order and with the same pattern"
            )
        result[choice.name] = mask.kept().to(weights[choice.name])
    return result
