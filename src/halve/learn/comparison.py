"""Learned masks against one-shot masks, on images that neither was made from: the better ones are returned."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halve.errors import LearningWarning, warn
from halve.learn.baseline import IMAGES, Baseline, OneShot
from halve.learn.batch_parts import images_in, pieces_of
from halve.learn.held_back import MOST, TOO_FEW, first
from halve.learn.schedule import USEFUL_STEPS
from halve.learn.stream import BatchStream
from halve.learn.validation import Quality, Validation
from halve.masks.mask import MaskSet

_VALIDATION = 0.02  # share of the time for the dense network on the validation images; each set of masks takes the same
_ONE_SHOT = (0.5, 0.15, 0.05)  # shares of the time for one-shot masks: where learning will come to little, well, or far
_ONE_SHOT_SECONDS = (5.0, 30.0)  # for one-shot masks in runs of few steps: as long as these take, within these limits
_LONGEST = 300.0  # seconds: other processes wait for the first one, and give up after 10 minutes
_LEARNED_PER_IMAGE = 16  # images learned from for each one validated on, in runs that are measured in steps
_MARGIN = 1.25  # the last pass may take longer than an earlier one
_PIECE = 16  # images that scores are measured on at once: a time limit is only seen in between
_FEWEST = 32  # images that scores are measured on
_GLIMPSED = 128  # images that masks are judged by in the middle of a run
CHOSE_LAYERS = "these images also chose the layers that stay dense"
_CHOSE_LAYERS = f"{CHOSE_LAYERS}; drop_data= measures the drop on others"
_MEASURING = 0.1  # share of the time for one-shot masks in which the network could be run on these images


@dataclass(frozen=True)
class Verdict:
    """The masks that are returned, and what is known of them.

    `unknown` says why nothing is. Otherwise `one_shot` are the best masks that learning had to beat.
    """

    masks: MaskSet
    unknown: str = ""
    images: int = 0
    source: str = ""
    learned: Quality | None = None
    one_shot: OneShot | None = None
    not_tried: Mapping[str, str] | None = None

    @property
    def fell_back(self) -> bool:
        """Whether the one-shot masks are returned."""
        return self.one_shot is not None and self.masks is self.one_shot.masks

    def warn(self) -> None:
        """Warn if the one-shot masks are returned."""
        if self.one_shot is not None and self.fell_back:
            warn(
                f"the learned masks are worse than one-shot masks on {self.images} images ({self.learned}, against "
                f"{self.one_shot.quality}): returning the one-shot masks, by {self.one_shot.score!r}. Learn longer, or "
                f"pass fallback=False to get the learned masks",
                LearningWarning,
            )

    def quality(self) -> dict[str, Any]:
        """What the recipe says of the quality of the masks."""
        if self.learned is None:
            return {"unknown": self.unknown}
        returned = self.one_shot if self.one_shot is not None and self.fell_back else None
        one_shot = None if self.one_shot is None else {"score": self.one_shot.score, **self.one_shot.quality.plain()}
        return {
            "images": self.images,
            "source": self.source,
            "returned": "learned" if returned is None else returned.score,
            **(self.learned if returned is None else returned.quality).plain(),
            "learned": self.learned.plain(),
            "one_shot": one_shot,
            "not_tried": dict(self.not_tried or {}),
        }


@dataclass(frozen=True)
class Plan:
    """What a run will do, as far as it is known before its first step.

    Args:
        steps: Its steps; None if it is measured in minutes.
        seconds: Time left for all that is to do; None if it is measured in steps.
        step_seconds: Seconds that a step takes.
        step_images: Images that a step learns from.
    """

    steps: int | None
    seconds: float | None
    step_seconds: float
    step_images: int

    def for_validation(self) -> tuple[int, float]:
        """How many images masks are judged by at most, and seconds that the dense network may take for them."""
        if self.steps is None:
            return MOST, _VALIDATION * (self.seconds or 0.0)
        return min(MOST, max(TOO_FEW, self.steps * self.step_images // _LEARNED_PER_IMAGE)), math.inf

    def for_one_shot(self) -> float:
        """Seconds for making one-shot masks: the more steps, the more surely learned masks are better."""
        instead, beside, aside = _ONE_SHOT
        if self.steps is None:
            seconds = self.seconds or 0.0
            steps = seconds / max(self.step_seconds, 1e-9)
            share = instead if steps < USEFUL_STEPS else beside if steps < 10 * USEFUL_STEPS else aside
            return min(share * seconds, _LONGEST)
        learning, (least, most) = self.steps * self.step_seconds, _ONE_SHOT_SECONDS
        if self.steps >= 10 * USEFUL_STEPS:
            return min(max(aside * learning, least), _LONGEST)
        return min(max(beside * learning, min(max(learning, least), most)), _LONGEST)


class Comparison:
    """Compares learned masks with one-shot masks, within a bounded share of the time.

    Args:
        validation: Judges masks; None if there are no images to judge by.
        baseline: Makes one-shot masks.
        stream: The images that masks are learned from.
        why_none: Why there are no images to judge by.
        complete: Completes masks for the user. It is timed, since it comes after learning as well.
        fallback: Whether to return one-shot masks that are better.
    """

    def __init__(
        self,
        validation: Validation | None,
        baseline: Baseline,
        stream: BatchStream,
        *,
        why_none: str,
        complete: Callable[[MaskSet], Any],
        fallback: bool,
    ) -> None:
        self._validation, self._baseline, self._stream = validation, baseline, stream
        self._why_none, self._complete, self._fallback = why_none, complete, fallback
        self._prepared = False

    def prepare(self, plan: Plan, batches: Sequence[Any], stop: Callable[[], bool]) -> float:
        """Make and judge one-shot masks before learning; returns the seconds that what follows learning will take.

        Args:
            plan: What the run will do.
            batches: The first batches to learn from.
            stop: Whether to stop early.
        """
        if self._validation is not None:
            self._validation.prepare(*plan.for_validation(), stop)
            self._find_one_shot(self._validation, plan, batches, stop)
        self._prepared = True
        if plan.seconds is None:
            return 0.0
        started = time.perf_counter()
        self._complete(self._baseline.initial)
        completing = time.perf_counter() - started
        return _MARGIN * (completing + (0.0 if self._validation is None else self._validation.seconds_to_judge))

    def _find_one_shot(
        self, validation: Validation, plan: Plan, batches: Sequence[Any], stop: Callable[[], bool]
    ) -> None:
        """Make and judge one-shot masks; only judge the masks to start from if no others would be returned."""
        if self._baseline.continues and not self._fallback:
            self._baseline.judge_start(validation)
            return
        seconds = plan.for_one_shot()
        images = self._images(batches, IMAGES if plan.steps is not None else self._affordable(seconds))
        self._baseline.find(validation, images, seconds, stop)

    def _affordable(self, seconds: float) -> int:
        """How many images to measure scores on, given how fast the network is."""
        assert self._validation is not None
        per_image = self._validation.seconds_to_prepare / self._validation.images
        return min(max(int(_MEASURING * seconds / max(per_image, 1e-9)), _FEWEST), IMAGES)

    def _images(self, batches: Sequence[Any], count: int) -> list[Any]:
        """The first images to learn from."""
        more = self._stream.peek_images(count - sum(map(images_in, batches)))
        return list(pieces_of(first([*batches, *more], count), _PIECE, _PIECE))

    @property
    def seconds_to_glimpse(self) -> float:
        """Seconds that `glimpse` takes; infinite if there are no images to judge by."""
        validation = self._validation
        if validation is None or not self._prepared:
            return math.inf
        seconds = validation.seconds_to_judge or validation.seconds_to_prepare
        return seconds * min(1.0, _GLIMPSED / validation.images)

    def glimpse(self, masks: MaskSet) -> float | None:
        """The agreement of masks in the middle of a run, on some of the images; nothing is decided by it."""
        return None if self._validation is None else self._validation.quality(masks, _GLIMPSED).agreement

    def choose(self, learned: MaskSet) -> Verdict:
        """Compare learned masks with the best one-shot masks."""
        if self._validation is None:
            return Verdict(learned, unknown=self._why_none)
        if not self._prepared:
            return Verdict(learned, unknown="interrupted")
        validation, best = self._validation, self._baseline.best
        quality = validation.quality(learned)
        better = best is not None and best.quality.loss < quality.loss
        chosen = best.masks if best is not None and better and self._fallback else learned
        return Verdict(chosen, "", validation.images, validation.source, quality, best, self._baseline.not_tried)

    def judged(self, masks: MaskSet, chose_layers: bool, returned: str | None = None) -> MaskSet:
        """The masks, with what they preserve now that some layers are left dense.

        What is known of masks in all layers, learned and one-shot, says nothing about these and is left out.

        Args:
            masks: The masks of the remaining layers.
            chose_layers: Whether the layers were chosen by the images that masks are judged by. The choice is one of
                many, so that these images bound nothing: the masks get no confidence interval.
            returned: What they are, if not what they were: "learned", or a score.
        """
        if self._validation is None or not self._prepared:
            return masks
        known = masks.recipe["quality"]
        now = {"returned": returned or known["returned"], **self._validation.quality(masks).plain()}
        if chose_layers and now["agreement_interval"] is not None:
            now |= {"agreement_interval": None, "no_interval": _CHOSE_LAYERS}
        return masks.with_recipe(quality=known | now | {"learned": None, "one_shot": None})
