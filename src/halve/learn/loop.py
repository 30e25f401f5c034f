"""The learning loop: steps within a budget, reports, saved states, and what happens when it is cut short."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from halve.errors import DataError, FileError, LearningWarning, first_line, warn
from halve.learn.batch_parts import images_in
from halve.learn.comparison import Comparison, Plan
from halve.learn.distributed import Processes
from halve.learn.interrupt import deferred_interrupt
from halve.learn.learner import Learner
from halve.learn.probe import Estimate, probe_step
from halve.learn.reporting import Report, Reporter
from halve.learn.run_state import RunFile, RunState
from halve.learn.schedule import USEFUL_STEPS, Schedule, StepValues
from halve.learn.settings import Settings
from halve.learn.step_graph import StepGraph
from halve.learn.stream import BatchStream
from halve.learn.time_budget import TimeBudget

_FUSED = ("cuda", "cpu")  # devices on which AdamW is one kernel
_EPSILON = 1e-10  # with millions of blocks, gradients are tiny
_MAX_STEPS_PER_SECOND = 100_000  # beyond any machine
_LOOK_EVERY = 10  # steps between looks at entropy and changed blocks; on a GPU, between synchronizations
_GLIMPSES = 0.03  # share of the time for measuring the agreement so far,
_GLIMPSE_EVERY = 0.05  # and share of the budget after which it is measured again
_FORESEEABLE = 0.1  # share of a run after which its number of steps is known well enough

Ended = Literal["finished", "interrupted", "data exhausted", "not finite", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `error` says what went wrong, if anything did, and `cause` is the exception that was raised."""

    ended: Ended
    steps: int
    noises: tuple[float, float]  # at the start and at the end
    step_graph: bool  # whether the step was recorded as a CUDA graph
    no_step_graph: str | None = None  # why not, on a GPU
    error: str | None = None
    cause: Exception | None = None

    def recipe(self) -> dict[str, Any]:
        """What masks remember of the run."""
        result = {
            "steps_done": self.steps,
            "ended": self.ended,
            "noise": list(self.noises),
            "step_graph": self.step_graph,
        }
        return result | ({"no_step_graph": self.no_step_graph} if self.no_step_graph else {})


class Loop:
    """One run of a learner on a stream of batches."""

    def __init__(
        self,
        learner: Learner,
        stream: BatchStream,
        settings: Settings,
        processes: Processes,
        reporter: Reporter,
        budget: TimeBudget,
        comparison: Comparison,
        file: RunFile | None = None,
    ) -> None:
        self.learner, self.stream, self.settings = learner, stream, settings
        self.processes, self.reporter, self.file = processes, reporter, file
        self.budget, self.comparison = budget, comparison
        self.logits = learner.sampler.logits
        self.optimizer = torch.optim.AdamW(
            [self.logits],
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            eps=_EPSILON,
            fused=self.logits.device.type in _FUSED,
        )
        self.initial_codes = learner.sampler.codes()
        self.step, self.batches, self.images = 0, 0, 0
        self.fraction = self.fraction_before = 0.0  # of the budget; before this call, if the run is resumed
        self.learning_seconds: float | None = None  # for all steps of this call, once that is known
        self.step_seconds = 0.0  # that one of them takes
        self.consistent = True  # False within an optimizer step: such a state must not be saved
        self.recent: list[tuple[Any, int, StepValues[float]]] = []  # batches since the last look
        self.changed, self.entropy = 0.0, learner.sampler.entropy()
        self.next_glimpse = self.glimpse_seconds = 0.0  # by the share of the budget; spent so far
        self.steps = self._planned_steps()
        self.schedule = Schedule(settings, self.steps)
        self.foreseen = self.steps is not None  # whether it is known if there will be enough steps
        self.step_graph: StepGraph | str = "not tried yet"
        self.error: str | None = None
        self.cause: Exception | None = None

    def run(self, resume: bool) -> Outcome:
        """Learn until the budget is spent, the data is exhausted, something fails or the user presses Ctrl-C.

        An exception before the first step is raised; after it, the outcome holds it, so that what was learned is kept.
        """
        if resume:
            self._resume()
        wrapped = self.processes.wrap(self.learner)
        ended: Ended = "interrupted"
        self.began = self.saved = time.perf_counter()
        self.first_step = self.step
        try:
            with (
                self.reporter.open(self.settings.described(), append=self.step > 0),
                deferred_interrupt() as interrupted,
            ):
                ended = self._loop(wrapped, interrupted)
        except KeyboardInterrupt:
            if self.consistent:
                self._save()
            warn(f"interrupted after {self.step} steps; {self._how_to_resume()}", LearningWarning)
        except Exception as error:  # of the data, a function of the user's, the log or the device
            if self.step == self.first_step:
                raise
            ended = self._failed(error)
        eager = self.step_graph if isinstance(self.step_graph, str) else None
        reason = eager if self.logits.is_cuda else None
        return Outcome(ended, self.step, self.schedule.noises, eager is None, reason, self.error, self.cause)

    def _loop(self, wrapped: Any, interrupted: Callable[[], bool]) -> Ended:
        bad = torch.zeros((), dtype=torch.bool, device=self.logits.device)
        planned = False
        while self._fraction() < 1:
            fraction = self._fraction()
            try:
                batches = [self.stream.next() for _ in range(self.settings.accumulate)]
            except StopIteration:
                return self._exhausted()
            except Exception:
                if interrupted():  # Ctrl-C also reached the worker processes of the loader
                    raise KeyboardInterrupt from None
                raise
            values = self.schedule.at(fraction, self.stream.epoch)
            if not planned:
                self._estimate(batches[0], values)
                self.step_graph = self._recorded(batches)
                self._plan(batches, interrupted)
                values = self.schedule.at(fraction, self.stream.epoch)
                planned = True
                self.began = time.perf_counter()
                self._save(first=True)
                if self._fraction() >= 1:  # no time is left
                    break
            loss = self._gradient(wrapped, batches, values)
            self.recent += [(batch, self.step, values) for batch in batches]
            bad |= ~self._guarded_gradient_()
            if self.processes.count == 1:  # losses differ between processes, gradients do not, and all must stop alike
                bad |= ~loss.isfinite()
            for group in self.optimizer.param_groups:
                group["lr"] = values.lr
            self.consistent = False
            self.optimizer.step()
            self.step += 1
            self.batches = self.stream.taken
            self.consistent = True
            self.images += sum(map(images_in, batches))
            look = self.step % _LOOK_EVERY == 0 or self._fraction() >= 1
            if look or not self.logits.is_cuda:
                if bool(bad):
                    return self._not_finite()
                self.recent.clear()
                self._report(float(loss), values, look)
            if self.file is not None and time.perf_counter() - self.saved >= self.file.save_every:
                self._save()
            if self.processes.broadcast(float(interrupted())):
                raise KeyboardInterrupt
            self._foresee()
        if not planned:
            self._plan_again(interrupted)
        self._foresee()
        return "finished"

    def _plan(self, batches: list[Any], interrupted: Callable[[], bool]) -> None:
        """Do all that comes before the first step, and divide the time that is left."""
        images = self.processes.count * sum(map(images_in, batches))
        plan = Plan(self.steps, self.budget.left, self.step_seconds, images)
        reserved = self.comparison.prepare(plan, batches, interrupted) if self.processes.is_main else 0.0
        reserved = self.processes.broadcast(reserved)
        if self.budget.left is not None:
            self.learning_seconds = self.budget.left - reserved
            expected = self.step + self.learning_seconds / self.step_seconds
            self.schedule = replace(self.schedule, steps=int(self.processes.broadcast(expected)))

    def _plan_again(self, interrupted: Callable[[], bool]) -> None:
        """Do what came before the first step of a run that is finished, so that its masks are judged once more."""
        images = self.settings.accumulate * self.processes.count * sum(map(images_in, self.stream.peek_images(1)))
        plan = Plan(self.steps, self.budget.seconds, self.budget.spent / max(self.step, 1), images)
        if self.processes.is_main:
            self.comparison.prepare(plan, [], interrupted)

    def _recorded(self, batches: list[Any]) -> StepGraph | str:
        """Record the step as a CUDA graph; returns the reason if it stays eager."""
        if self.processes.count > 1 or len(batches) > 1:
            return "several processes, or several batches per step"
        return StepGraph.recorded(self.learner, batches[0])

    def _gradient(self, wrapped: Any, batches: list[Any], values: StepValues[float]) -> Tensor:
        if isinstance(self.step_graph, StepGraph) and self.step_graph.fits(batches[0]):
            return self.step_graph.gradient_(batches[0], self.step, values)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.logits.device)
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            local = wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not last else nullcontext()
            with local:
                loss = wrapped(batch, self.step, values, micro) / len(batches)
                loss.backward()
            total += loss.detach()
        return total

    def _guarded_gradient_(self) -> Tensor:
        """Whether the gradient is finite; if not, zero it so that the logits stay good."""
        grad = self.logits.grad
        assert grad is not None
        fine = grad.sum().isfinite()
        grad.masked_fill_(~fine, 0.0)
        return fine

    def _fraction(self) -> float:
        """Share of the budget spent so far, by the main process's clock."""
        if self.steps is not None:
            self.fraction = self.step / self.steps
        elif self.learning_seconds is not None:
            self.fraction = self.processes.broadcast(self._fraction_of_time(self.learning_seconds))
        return self.fraction

    def _fraction_of_time(self, total: float) -> float:
        here = time.perf_counter() - self.began
        steps = self.step - self.first_step
        if here + (here / steps if steps else self.step_seconds) / 2 >= total:  # too late for the better part of a step
            return 1.0
        return self.fraction_before + (1 - self.fraction_before) * here / total

    def _planned_steps(self) -> int | None:
        if self.budget.seconds is not None:
            return None
        if self.settings.epochs is None:
            return self.settings.steps
        if self.stream.length is None:
            raise DataError("epochs= needs data with a length, such as a DataLoader; use steps= or minutes= instead")
        return max(1, round(self.settings.epochs * self.stream.length / self.settings.accumulate))

    def _estimate(self, batch: Any, values: StepValues[float]) -> None:
        seconds, peak = probe_step(self.learner, batch, values)
        self.step_seconds = seconds * self.settings.accumulate
        total = (self.budget.left or 0) if self.steps is None else self.step_seconds * (self.steps - self.step)
        self.reporter.send(Estimate(self.step_seconds, max(total, 0.0), peak, self.steps))

    def _foresee(self) -> None:
        """Warn once if the time is too short for learning to get far."""
        if self.foreseen or self.learning_seconds is None or self.fraction < min(1.0, self._foreseeable()):
            return
        self.foreseen = True
        steps, share = self.step - self.first_step, self.fraction - self.fraction_before
        expected = self.step + (round(steps / share * (1 - self.fraction)) if share > 0 else 0)
        if expected >= USEFUL_STEPS or not self.processes.is_main:
            return
        per_step = (time.perf_counter() - self.began) / steps if steps else self.step_seconds
        rest = (self.budget.seconds or 0) - self.learning_seconds
        minutes = math.ceil((rest + USEFUL_STEPS * per_step) / 6) / 10
        warn(
            f"there is time for only about {expected} steps, and masks improve a lot up to {USEFUL_STEPS} and more: "
            f"pass minutes={minutes:g} or more, smaller batches, or use a faster device",
            LearningWarning,
        )

    def _foreseeable(self) -> float:
        return self.fraction_before + _FORESEEABLE * (1 - self.fraction_before)

    def _glimpse(self) -> float | None:
        """The agreement of the masks so far, now and then, as far as that takes little time."""
        elapsed, cost = time.perf_counter() - self.began, self.comparison.seconds_to_glimpse
        if self.fraction < self.next_glimpse or self.glimpse_seconds + cost > _GLIMPSES * elapsed:
            return None
        started = time.perf_counter()
        agreement = self.comparison.glimpse(self.learner.masks(self.settings.final, self.settings.seed))
        self.glimpse_seconds += time.perf_counter() - started
        self.next_glimpse = self.fraction + _GLIMPSE_EVERY
        return agreement

    def _report(self, loss: float, values: StepValues[float], look: bool) -> None:
        if look:
            self.entropy = self.learner.sampler.entropy()
            self.changed = float((self.learner.sampler.codes() != self.initial_codes).double().mean())
        here = max(time.perf_counter() - self.began, 1e-9)
        rate = (self.step - self.first_step) / here
        left = (self.steps - self.step) / rate if self.steps else self.budget.left or 0.0
        report = Report(
            step=self.step,
            steps=self.steps,
            loss=loss,
            entropy=self.entropy,
            changed=self.changed,
            lr=values.lr,
            temperature=values.temperature,
            noise=values.noise,
            guidance=values.guidance,
            images_per_s=self.images * self.processes.count / here,
            seconds=self.budget.spent,
            seconds_left=max(left, 0.0),
            agreement=self._glimpse() if look and self.processes.is_main else None,
        )
        self.reporter.send(report, keep=look)

    def _save(self, first: bool = False) -> None:
        """Save the state. A disk that fails stops the run at the first save; later on it is a warning."""
        self.saved = time.perf_counter()
        if self.file is None or not self.processes.is_main:
            return
        try:
            progress = (self.step, self.batches, self.budget.spent, min(self.fraction, 1.0))
            self.file.save(self.optimizer, self.logits, *progress)
        except FileError as error:
            if first:
                raise
            warn(f"{error}; the state was not saved", LearningWarning)

    def _resume(self) -> None:
        assert self.file is not None
        state = self.file.restore_(self.optimizer, self.logits)
        self._check_progress(state)
        self.step, self.batches = state.step, state.batches
        self.fraction = self.fraction_before = state.fraction
        self.budget.resume(state.seconds)
        left = self._fraction() < 1
        if self.stream.repeats:
            try:
                self.stream.skip(state.batches if left else min(state.batches, 1))  # a finished run reads no more
            except StopIteration:
                raise DataError(
                    f"the data has no batches left to resume with: {self.file.path} was learned from {state.batches}"
                ) from None
        else:
            warn(
                "the data is an iterator, which cannot be rewound: learning continues with the batches that come next, "
                "and the masks will not be bit-identical to those of an uninterrupted run",
                LearningWarning,
            )

    def _check_progress(self, state: RunState) -> None:
        """Raise `FileError` for a state that no run reaches: skipping its batches could take forever."""
        assert self.file is not None
        batches, steps = state.step * self.settings.accumulate, 1 + _MAX_STEPS_PER_SECOND * state.seconds
        if state.batches > batches or (self.steps is None and state.step > steps):
            raise FileError(
                f"{self.file.path} is damaged: {state.step:,} steps in {state.seconds:,.0f} s read at most {batches:,} "
                f"batches, it says {state.batches:,}; start a new run with another run_state="
            )
        if self.steps is not None and state.step > self.steps:
            raise FileError(
                f"{self.file.path} is damaged: it says {state.step:,} steps were done of {self.steps:,}; "
                f"start a new run with another run_state="
            )

    def _exhausted(self) -> Ended:
        if self.step == 0:
            raise DataError("the data gave no batch: it is empty, or an iterator that was consumed before")
        self._save()
        warn(
            f"the data was exhausted after {self.step} steps; "
            f"pass data that can be iterated over again, such as a DataLoader",
            LearningWarning,
        )
        return "data exhausted"

    def _not_finite(self) -> Ended:
        self._save()
        found = (self.learner.blame(batch, step, values) for batch, step, values in self.recent)
        layer = next((name for name in found if name is not None), None)
        self.error = (
            f"the loss is NaN or infinite by step {self.step}, "
            f"{'in the objective itself' if layer is None else f'first in layer {layer}'}; "
            f"check the images, lower lr= or exclude the layer. The masks learned so far are in the error's .masks; "
            f"{self._how_to_resume()}"
        )
        return "not finite"

    def _failed(self, error: Exception) -> Ended:
        if self.consistent:
            try:
                self._save()
            except Exception as again:  # a device that failed cannot be read
                warn(f"the state of the run was not saved: {first_line(again)}", LearningWarning)
        self.cause = error
        self.error = (
            f"learning failed after {self.step} steps: {first_line(error)}. "
            f"The masks learned so far are in the error's .masks; {self._how_to_resume()}"
        )
        return "failed"

    def _how_to_resume(self) -> str:
        if self.file is None:
            return "pass run_state=FILE to be able to resume a run"
        return f"resume=True continues from {self.file.path}"
