"""The best one-shot masks that fit into the budget: learned masks must be better to be worth learning."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from halve.batches import Progress, tracked
from halve.errors import first_line
from halve.learn.initialization import Inputs, Layers
from halve.learn.settings import Settings
from halve.learn.validation import Quality, Validation
from halve.masks.mask import Mask, MaskSet
from halve.progress import known_length
from halve.prune.score import ScoreInputs
from halve.prune.scores import SCORES
from halve.select.select import Choice

IMAGES = 256  # that scores are measured on
_SCORES = ("magnitude", "wanda", "reconstruct")  # the slowest last
_UNFINISHED = "it would not have finished in time"
_NOT_NEEDED = "learning continues from existing masks, and fallback=False"


@dataclass(frozen=True)
class OneShot:
    """Masks that were made in one shot, and what they preserve."""

    score: str
    masks: MaskSet
    quality: Quality


@dataclass
class Baseline:
    """One-shot masks of a model, in its channel orders.

    Args:
        inputs: The model and how to run it.
        layers: The masked layers.
        choices: These layers with their channel orders.
        settings: The settings of the run.
        initial: The masks that learning starts from.
    """

    inputs: Inputs
    layers: Layers
    choices: Sequence[Choice]
    settings: Settings
    initial: MaskSet
    best: OneShot | None = None
    not_tried: dict[str, str] = field(default_factory=dict)  # scores, and why

    @property
    def continues(self) -> bool:
        """Whether learning continues from existing masks."""
        return isinstance(self.settings.start, MaskSet)

    def judge_start(self, validation: Validation) -> None:
        """Judge the masks that learning starts from, and make no others."""
        self._judge("start", self.initial, validation)
        self.not_tried |= dict.fromkeys(_SCORES, _NOT_NEEDED)

    def find(
        self, validation: Validation, batches: Sequence[Any], seconds: float, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Make masks by one score after another, and keep the best.

        Args:
            validation: Judges the masks.
            batches: Images to measure scores on.
            seconds: Time limit. The masks that learning starts from and magnitudes take next to none of it.
            stop: Whether to stop early.
        """
        deadline = time.perf_counter() + seconds
        start = _name_of(self.settings)
        if start is not None:
            self._judge(start, self.initial, validation)
        for score in _SCORES:
            if score == start:
                continue
            progress = _limited(self.inputs.progress, deadline, stop)
            try:
                masks = self._masks(score, batches, progress)
            except _OutOfTimeError:
                self.not_tried[score] = _UNFINISHED
            except Exception as error:  # scores run the model's own code, which may raise anything
                self.not_tried[score] = first_line(error)
            else:
                self._judge(score, masks, validation)

    def _judge(self, score: str, masks: MaskSet, validation: Validation) -> None:
        quality = validation.quality(masks)
        if self.best is None or quality.loss < self.best.quality.loss:
            self.best = OneShot(score, masks, quality)

    def _masks(self, score: str, batches: Sequence[Any], progress: Progress) -> MaskSet:
        inputs = self.inputs
        scores = SCORES[score].compute(
            ScoreInputs(
                *(inputs.model, self.choices, self.layers.weights, batches),
                seed=self.settings.seed,
                forward=inputs.forward,
                progress=progress,
            )
        )
        masks = {}
        for choice in self.choices:
            assert choice.pattern is not None
            assert choice.layout is not None
            masks[choice.name] = Mask.from_scores(choice.pattern, choice.layout, scores.by_layer.pop(choice.name))
        return MaskSet(masks)


def _name_of(settings: Settings) -> str | None:
    """What the masks that learning starts from are called; None for logits that favour no masks yet."""
    if settings.start == "glorot" or not settings.alpha:
        return None
    if isinstance(settings.start, MaskSet):
        return "start"
    return str(getattr(settings.start, "__name__", "function") if callable(settings.start) else settings.start)


class _OutOfTimeError(Exception):
    """A loop that would not end before its deadline."""


def _limited(progress: Progress | None, deadline: float, stop: Callable[[], bool]) -> Progress:
    """A progress display that raises `_OutOfTimeError` as soon as a loop is expected to end after the deadline."""

    def watch(items: Iterable[Any], what: str) -> Iterator[Any]:
        total, started = known_length(items) or 1, time.perf_counter()
        for done, item in enumerate(tracked(items, progress, f"one-shot masks: {what}")):
            now = time.perf_counter()
            expected = now if not done else started + (now - started) / done * max(total, done)
            if expected > deadline or stop():
                raise _OutOfTimeError
            yield item

    return watch
