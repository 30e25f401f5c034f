"""The learning loop: steps within a budget, reports, checkpoints, and what happens when it is cut short."""

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from halve.batches import images_of
from halve.errors import DataError, FileError, LearningError, LearningWarning
from halve.learn.distributed import Ranks
from halve.learn.interrupt import deferred_interrupt
from halve.learn.learner import Learner
from halve.learn.probe import Estimate, try_step
from halve.learn.reporting import Report, Reporter
from halve.learn.run_state import Checkpoint, optimizer_state, restore_
from halve.learn.schedule import Pace
from halve.learn.settings import Settings
from halve.learn.step_graph import Replay
from halve.learn.stream import Feed
from halve.masks.mask import MaskSet

_EPSILON = 1e-10  # gradients are tiny where there are millions of blocks
_LOOK_EVERY = 10  # steps between looks at entropy and changed blocks, and on a GPU at anything: looking waits for it


class Loop:
    """One run. `masks_now(recipe)` gives the masks as they stand."""

    def __init__(
        self,
        learner: Learner,
        feed: Feed,
        settings: Settings,
        ranks: Ranks,
        identity: dict[str, Any],
        masks_now: Callable[[dict[str, Any]], MaskSet],
        reporter: Reporter,
        checkpoint: str | Path | None,
        checkpoint_every: float,
        permutation: dict[str, Any] | None = None,
    ) -> None:
        self.learner, self.feed, self.settings, self.ranks = learner, feed, settings, ranks
        self.identity, self.masks_now, self.reporter = identity, masks_now, reporter
        self.path, self.every = None if checkpoint is None else Path(checkpoint), checkpoint_every
        self.permutation = permutation
        self.logits = learner.sampler.logits
        self.optimizer = torch.optim.AdamW(
            [self.logits],
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            eps=_EPSILON,
            fused=self.logits.is_cuda,
        )
        self.start_codes = learner.sampler.codes()
        self.step, self.batches, self.before, self.images = 0, 0, 0.0, 0
        self.whole = True  # False while a step is half done: such a state must not be saved
        self.recent: list[tuple[Any, int, Pace[float]]] = []  # what was learned from since the last look
        self.changed, self.entropy = 0.0, learner.sampler.entropy()
        self.minutes = settings.budget_minutes
        self.steps = self._planned_steps()
        self.replay: Replay | str = "not tried yet"

    def run(self, resume: bool) -> MaskSet:
        """Learn until the budget is spent, the data runs dry or somebody presses Ctrl-C."""
        if resume:
            self._resume()
        wrapped = self.ranks.wrap(self.learner)
        ended = "interrupted"
        self.began = self.saved = time.perf_counter()
        self.first_step = self.step
        try:
            with (
                self.reporter.open(self.settings.described(), append=self.step > 0),
                deferred_interrupt() as interrupted,
            ):
                ended = self._loop(wrapped, interrupted)
        except KeyboardInterrupt:
            if self.whole:
                self._save()
            warnings.warn(f"interrupted after {self.step} steps; {self._how_to_go_on()}", LearningWarning, stacklevel=3)
        masks = self._masks(ended)
        self.replay = "done"  # a recorded graph holds on to its memory
        return masks

    def _loop(self, wrapped: Any, interrupted: Callable[[], bool]) -> str:
        bad = torch.zeros((), dtype=torch.bool, device=self.logits.device)
        estimated = False
        while self._fraction() < 1:
            fraction = self._fraction()
            try:
                batches = [self.feed.next() for _ in range(self.settings.accumulate)]
            except StopIteration:
                return self._dry()
            except Exception:
                if interrupted():  # Ctrl-C reached the loader's worker processes too
                    raise KeyboardInterrupt from None
                raise
            pace = self.settings.pace_at(fraction, self.feed.epoch)
            if not estimated:
                self._estimate(batches[0], pace)
                self.replay = self._recorded(batches)
                estimated = True
                self.began = time.perf_counter()
                self._save(first=True)
            loss = self._gradient(wrapped, batches, pace)
            self.recent += [(batch, self.step, pace) for batch in batches]
            bad |= ~self._guarded_gradient_()
            if self.ranks.count == 1:  # the gradient is the same on all ranks, the loss is not, and all must stop alike
                bad |= ~loss.isfinite()
            for group in self.optimizer.param_groups:
                group["lr"] = pace.lr
            self.whole = False
            self.optimizer.step()
            self.step += 1
            self.batches = self.feed.taken
            self.whole = True
            self.images += sum(_images_in(batch) for batch in batches)
            look = self.step % _LOOK_EVERY == 0 or self._fraction() >= 1
            if look or not self.logits.is_cuda:
                if bool(bad):
                    self._give_up()
                self.recent.clear()
                self._report(float(loss), pace, look)
            if self.path is not None and time.perf_counter() - self.saved >= self.every:
                self._save()
            if self.ranks.agree(float(interrupted())):
                raise KeyboardInterrupt
        return "finished"

    def _recorded(self, batches: list[Any]) -> Replay | str:
        """The step as a CUDA graph, or why it runs as it is."""
        if self.ranks.count > 1 or len(batches) > 1:
            return "several ranks, or several batches in a step"
        return Replay.recorded(self.learner, batches[0])

    def _gradient(self, wrapped: Any, batches: list[Any], pace: Pace[float]) -> Tensor:
        if isinstance(self.replay, Replay) and self.replay.fits(batches[0]):
            return self.replay.gradient_(batches[0], self.step, pace)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.logits.device)
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            quiet = wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not last else nullcontext()
            with quiet:
                loss = wrapped(batch, self.step, pace, micro) / len(batches)
                loss.backward()
            total += loss.detach()
        return total

    def _guarded_gradient_(self) -> Tensor:
        """Whether the gradient is finite; if not it is set to zero, so that what was learned stays good."""
        grad = self.logits.grad
        assert grad is not None
        fine = grad.sum().isfinite()
        grad.masked_fill_(~fine, 0.0)
        return fine

    def _fraction(self) -> float:
        """Share of the budget that is spent; the first rank's clock counts."""
        if self.steps is not None:
            return self.step / self.steps
        assert self.minutes is not None
        return self.ranks.agree(self._seconds() / (60 * self.minutes))

    def _seconds(self) -> float:
        return self.before + time.perf_counter() - self.began

    def _planned_steps(self) -> int | None:
        if self.minutes is not None:
            return None
        if self.settings.epochs is None:
            return self.settings.steps
        if self.feed.length is None:
            raise DataError("epochs= needs data with a length, such as a DataLoader; give steps= or minutes= instead")
        return max(1, round(self.settings.epochs * self.feed.length / self.settings.accumulate))

    def _estimate(self, batch: Any, pace: Pace[float]) -> None:
        seconds, peak = try_step(self.learner, batch, pace)
        per_step = seconds * self.settings.accumulate
        left = 60 * (self.minutes or 0) - self.before
        whole = left if self.steps is None else per_step * (self.steps - self.step)
        self.reporter.tell(Estimate(per_step, whole, peak, self.steps))

    def _report(self, loss: float, pace: Pace[float], look: bool) -> None:
        if look:
            self.entropy = self.learner.sampler.entropy()
            self.changed = float((self.learner.sampler.codes() != self.start_codes).double().mean())
        here = max(time.perf_counter() - self.began, 1e-9)
        rate = (self.step - self.first_step) / here
        left = (self.steps - self.step) / rate if self.steps else 60 * (self.minutes or 0) - self._seconds()
        images = self.images * self.ranks.count / here
        report = Report(
            self.step,
            self.steps,
            loss,
            self.entropy,
            self.changed,
            pace.lr,
            pace.temperature,
            pace.noise,
            pace.guidance,
            images,
            self._seconds(),
            max(left, 0.0),
        )
        self.reporter.tell(report, keep=look)

    def _save(self, first: bool = False) -> None:
        """Write the checkpoint; a disk that fails later on does not end the run, one that fails at first does."""
        self.saved = time.perf_counter()
        if self.path is None or not self.ranks.first:
            return
        averages = optimizer_state(self.optimizer, self.logits)
        state = Checkpoint(
            self.identity,
            self.step,
            self.batches,
            self._seconds(),
            self.logits.detach(),
            *averages,
            self.permutation,
        )
        try:
            state.save(self.path)
        except FileError as error:
            if first:
                raise
            warnings.warn(f"{error}; learning goes on", LearningWarning, stacklevel=4)

    def _resume(self) -> None:
        if self.path is None:
            raise FileError("resume=True needs checkpoint=, the file to go on from")
        state = Checkpoint.load(self.path, self.identity, self.logits)
        restore_(self.optimizer, self.logits, state)
        self.step, self.batches, self.before = state.step, state.batches, state.seconds
        if self.feed.again:
            try:
                self.feed.skip(state.batches)
            except StopIteration:
                raise DataError(
                    f"the data gives no batches any more, {self.path} was learned from {state.batches}"
                ) from None
        else:
            warnings.warn(
                "the data is an iterator, so its order is lost: learning goes on with whatever comes next, "
                "and the outcome will not be the same to the bit",
                LearningWarning,
                stacklevel=4,
            )

    def _dry(self) -> str:
        if self.step == 0:
            raise DataError("the data gave no batch: it is empty, or an iterator that was used up before")
        self._save()
        warnings.warn(
            f"the data ran dry after {self.step} steps; pass what can be iterated over again, such as a DataLoader",
            LearningWarning,
            stacklevel=4,
        )
        return "ran dry"

    def _give_up(self) -> None:
        self._save()
        found = (self.learner.blame(batch, step, pace) for batch, step, pace in self.recent)
        layer = next((name for name in found if name is not None), None)
        raise LearningError(
            f"the loss is NaN or infinite by step {self.step}, "
            f"{'in the objective itself' if layer is None else f'first in layer {layer}'}; "
            f"check the images, lower lr= or leave the layer out. What was learned is in the error's .masks; "
            f"{self._how_to_go_on()}",
            self._masks("not finite"),
        )

    def _how_to_go_on(self) -> str:
        return f"resume=True goes on from {self.path}" if self.path else "with checkpoint=FILE it could be resumed"

    def _masks(self, ended: str) -> MaskSet:
        replayed = isinstance(self.replay, Replay)
        told = {"steps_done": self.step, "seconds": round(self._seconds(), 1), "ended": ended, "replayed": replayed}
        if not replayed and self.logits.is_cuda:
            told["not_replayed"] = self.replay
        return self.masks_now(told)


def _images_in(batch: Any) -> int:
    try:
        return len(images_of(batch))
    except DataError:  # only the user's own forward knows what is in it
        return 1
