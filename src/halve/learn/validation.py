"""How far a masked network agrees with the dense one, on images that its masks were not learned from."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from halve.agreement import Agreement, compare
from halve.binomial import interval
from halve.errors import DataError, ModelError
from halve.learn.batch_parts import images_in, pieces_of
from halve.learn.held_back import LEAST, Split, first
from halve.learn.learner import Learner
from halve.learn.settings import Settings
from halve.masks.mask import MaskSet

_PIECE = 64  # images that are run at once
_COMPARED = 6  # sets of masks that are judged on the same images, at most: one-shot, learned, with layers left dense
_MOST_BYTES = 1 << 29  # of images and outputs, kept for the next masks


@dataclass(frozen=True)
class Quality:
    """What masks preserve of the dense network on some images.

    Args:
        agreement: Share of images with the dense network's top-1 class; None for outputs that are not class scores.
        kl: Mean KL divergence from the dense network's class probabilities, in nats; None likewise.
        output_error: Norm of the difference of the outputs, relative to that of the dense network's outputs.
        agreement_interval: An exact 95 % confidence interval of the agreement, valid for all masks that are compared at
            once, since the best of them are returned.
    """

    agreement: float | None
    kl: float | None
    output_error: float
    agreement_interval: tuple[float, float] | None = None

    @property
    def loss(self) -> float:
        """What masks are compared by, the lower the better: KL divergence, or the output error without class scores."""
        value = self.output_error if self.kl is None else self.kl
        return value if math.isfinite(value) else math.inf

    def plain(self) -> dict[str, Any]:
        """The numbers as JSON values; what is not finite becomes None."""
        numbers = asdict(self)
        ends = numbers.pop("agreement_interval")
        plain: dict[str, Any] = {
            name: None if value is None or not math.isfinite(value) else round(value, 6)
            for name, value in numbers.items()
        }
        return plain | {"agreement_interval": None if ends is None else [round(end, 6) for end in ends]}

    def __str__(self) -> str:
        if self.kl is None:
            return f"output error {100 * self.output_error:.1f} %"
        return f"agreement {100 * (self.agreement or 0):.1f} %, KL {self.kl:.4f}"


class Validation:
    """Images to judge masks by, with the dense network's outputs on them."""

    def __init__(self, learner: Learner, split: Split, settings: Settings) -> None:
        """Judge by what was held back, which is read by `prepare`."""
        self._learner, self._batches, self._seed = learner, split.held_back, settings.seed
        self._class_scores = settings.match != "outputs+features"  # if they have the shape (images, classes)
        self._pieces: list[tuple[Any, Tensor]] = []  # images, and the dense network's outputs
        self.source, self.images = split.source, 0
        self.seconds_to_prepare = self.seconds_to_judge = 0.0

    def prepare(self, most: int, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Read up to `most` images and run the dense network on them, for about `seconds`, on at least 8 images."""
        started, size = time.perf_counter(), 0
        with torch.random.fork_rng(devices=[]):  # neither changes the order of the data nor depends on it
            torch.default_generator.manual_seed(self._seed)
            for piece in pieces_of(first(self._batches, most), LEAST, _PIECE):
                output = self._learner.output(piece)
                self._pieces.append((piece, output))
                self.images += images_in(piece)
                size += sum(t.nbytes for t in pytree.tree_leaves((piece, output)) if isinstance(t, Tensor))
                self.seconds_to_prepare = time.perf_counter() - started
                with_next_piece = self.seconds_to_prepare * (1 + min(2 * images_in(piece), _PIECE) / self.images)
                if self.images >= LEAST and (size >= _MOST_BYTES or with_next_piece > seconds or stop()):
                    break
        if not self.images:
            raise DataError("validation= has no images: pass batches of images, or validation=False")

    def quality(self, masks: MaskSet, most: int | None = None) -> Quality:
        """Judge masks on about `most` images (default: all)."""
        started = time.perf_counter()
        tensors = self._learner.tensors(masks)
        agreement, squares, scale = Agreement(), 0.0, 0.0
        judged = 0
        for piece, dense in self._pieces:
            if most is not None and judged >= most:
                break
            judged += images_in(piece)
            output = self._learner.output(piece, tensors)
            if output.shape != dense.shape:
                raise ModelError(
                    f"the masked network returns outputs of shape {tuple(output.shape)}, the dense one "
                    f"{tuple(dense.shape)}: pass a forward= whose outputs have equal shapes, or validation=False"
                )
            if self._class_scores and dense.dim() == 2 and dense.shape[1] > 1:
                agreement += compare(output, dense)
            squares += float((output.double() - dense.double()).square().sum())
            scale += float(dense.double().square().sum())
        if judged == self.images:
            self.seconds_to_judge = max(self.seconds_to_judge, time.perf_counter() - started)
        error = math.sqrt(squares / max(scale, 1e-300))
        if not agreement.images:
            return Quality(None, None, error)
        kl = agreement.kl if math.isfinite(agreement.kl_sum) else math.inf
        return Quality(agreement.share, kl, error, interval(agreement.same, agreement.images, 1 - 0.05 / _COMPARED))
