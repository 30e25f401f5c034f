"""Several sets of masks, from the fastest network to the most accurate one."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

from halve.batches import Forward, Progress
from halve.errors import DataError, LearningWarning, OptionError, warn
from halve.learn.accuracy_budget import by_worth, costs_of
from halve.learn.comparison import CHOSE_LAYERS
from halve.learn.held_back import chosen_from, hold_back, hold_back_none
from halve.learn.interrupt import deferred_interrupt
from halve.learn.learn import learn, options_to_relearn, with_estimate
from halve.learn.probe import Estimate
from halve.learn.reporting import Report
from halve.markup import table
from halve.masks.mask import MaskSet
from halve.modules import unwrapped
from halve.process_state import preserved_process_state
from halve.progress import StatusLine, bar
from halve.select.speed_plan import SpeedPlan, plan_of
from halve.text import aligned, interval

POINTS = 5
COLUMNS = ("layers masked", "weights", "ms", "speed-up", "agreement", "95 % interval", "KL")


@dataclass(frozen=True)
class Start:
    """A point that is learned next: its number, of how many, and how many layers are masked; None if unknown yet."""

    number: int
    points: int
    layers: int | None = None

    def __str__(self) -> str:
        return f"point {self.number} of {self.points}"


@dataclass(frozen=True)
class Point:
    """Masks, with the time of the network that the plan estimates, and what they preserve on images held back."""

    masks: MaskSet
    ms: float
    speedup: float
    agreement: float | None
    kl: float | None
    images: int | None = None  # that these were measured on
    agreement_interval: tuple[float, float] | None = None  # with a confidence of 95 %

    def cells(self) -> tuple[str, ...]:
        """The point as table cells, one per column in `COLUMNS`."""
        weights = sum(mask.layout.weights for mask in self.masks.values())
        agreement = "-" if self.agreement is None else f"{100 * self.agreement:.1f} %"
        ends = interval(self.agreement_interval)
        kl = "-" if self.kl is None else f"{self.kl:.4f}"
        return (str(len(self.masks)), f"{weights:,}", f"{self.ms:.3f}", f"{self.speedup:.2f} x", agreement, ends, kl)


class Frontier(Sequence[Point]):
    """Points from the fastest to the most accurate. Prints as a table.

    `interrupted` says whether Ctrl-C ended it before all points were learned.
    """

    def __init__(self, points: Sequence[Point], plan: SpeedPlan, *, interrupted: bool = False) -> None:
        self._points, self.plan, self.interrupted = tuple(points), plan, interrupted

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Point]: ...
    def __getitem__(self, index: int | slice) -> Point | Sequence[Point]:
        return self._points[index]

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    @property
    def measured_on(self) -> str:
        """How many images the agreement was measured on."""
        images = next((point.images for point in self if point.images is not None), None)
        return "agreement not measured" if images is None else f"agreement on {images} images"

    @property
    def _title(self) -> str:
        where = f"{self.plan.device}, {self.plan.dtype}, batch {self.plan.batch}"
        return f"{where}; {self.plan.summary}; {self.measured_on}"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return table(self._title, [f">{column}" for column in COLUMNS], [point.cells() for point in self])

    def __str__(self) -> str:
        rows = [COLUMNS, *(point.cells() for point in self)]
        return "\n".join([self._title, *aligned(rows, right=True)])


@preserved_process_state()
def frontier(
    model: nn.Module,
    data: Any,
    plan: SpeedPlan | str | Path,
    *,
    points: int = POINTS,
    validation: Any = None,
    report: Callable[[Start | Estimate | Report | Point], None] | None = None,
    forward: Forward | None = None,
    progress: Progress = True,
    **options: Any,
) -> Frontier:
    """Learn masks at several speeds: each point leaves more layers dense, those whose masks save least for their cost.

    The first point masks every layer that is worth it by the plan (`plan.paying`). Each further point is learned on
    from the one before, for a quarter of its steps. A layer's cost is the KL divergence of the outputs when it alone is
    masked. Ctrl-C ends the call and returns the points that are finished; if there are none, it raises
    `KeyboardInterrupt`.

    Args:
        model: The trained network. It is not changed.
        data: Batches of images, as for `halve.learn`.
        plan: What `halve.measure` found on the machine that the network will run on, or the file it was saved to.
        points: Number of points. Default: 5.
        validation: Images to measure agreement on. Default: some are held back, as in `halve.learn`.
        report: Function that receives a `Start` before each point, what `halve.learn` reports, and each `Point` when it
            is finished, for example to save its masks.
        forward: Function of (model, batch) that runs the model on an unusual batch.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        **options: Options of `halve.learn`, such as `minutes` for the first point, `target` and `seed`.

    Returns:
        The points, fastest first, each with its masks.

    >>> import halve, torch
    >>> from halve.machine import device_names
    >>> from halve.select.speed_plan import LayerSpeed
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    >>> layers = {"0": LayerSpeed((16, 8), "", 0.2, 0.1), "2": LayerSpeed((16, 16), "", 0.3, 0.1)}
    >>> plan = SpeedPlan(layers, device_names()[-1], "float32", 1, (8,), 0.6, 0.5, 0.3)
    >>> found = frontier(model, torch.randn(128, 8), plan, points=2, steps=4, permute=False, fallback=False)
    >>> [len(point.masks) for point in found]
    [2, 1]
    """
    model = unwrapped(model)
    if not isinstance(points, int) or points < 1:
        raise OptionError(f"points must be a positive integer, got {points!r}")
    if report is not None and not callable(report):
        raise OptionError(f"report must be a function, got {report!r}")
    speeds = plan_of(plan)
    _check_speeds(speeds)
    seed = options.get("seed", 0)
    split = hold_back(data, seed) if validation is None else hold_back_none(data, seed)
    images = list(split.held_back if validation is None else chosen_from(validation, seed))
    if not images:
        raise DataError(f"a frontier needs images to measure agreement on: {split.reason}; pass validation=")
    if split.kind == "iterator":
        raise DataError("a frontier reads the data several times: pass a list, a tensor or a DataLoader")
    shown = _Line() if report is None and progress is True else None
    tell = report or shown or (lambda event: None)
    common: dict[str, Any] = {"validation": images, "forward": forward, "progress": progress, "report": tell}
    found: list[Point] = []

    def learned(start: Start, dense: dict[str, float] | None = None, /, **options: Any) -> MaskSet:
        tell(start)
        masks = _uninterrupted(model, split.data, **common, **options)
        if dense is not None:  # these images chose the layers, so that they give no interval
            quality = masks.recipe["quality"] | {"agreement_interval": None, "no_interval": CHOSE_LAYERS}
            masks = with_estimate(masks.with_recipe(left_dense=dense, quality=quality), speeds)
        found.append(_point(masks, speeds))
        with deferred_interrupt() as interrupted:  # so that what was reported is what is returned
            tell(found[-1])
            if interrupted():
                raise KeyboardInterrupt
        return masks

    try:
        masks = learned(Start(1, points), plan=speeds, **options)
        steps = masks.recipe["steps_done"]
        costs = costs_of(model, masks, images, forward=forward, progress=progress)
        order = by_worth(costs, speeds)
        rest = _thinned(order, speeds, points)
        points = 1 + len(rest)
        for number, left in enumerate(rest, 2):
            start = masks.without(set(masks) - set(left))
            dense = {name: costs[name] for name in order if name not in left}
            again = options_to_relearn(options, start, steps)
            masks = learned(Start(number, points, len(left)), dense, **again)
    except KeyboardInterrupt:
        if not found:
            raise
        warn(f"interrupted: {len(found)} of {points} points are finished", LearningWarning)
        return Frontier(found, speeds, interrupted=True)
    finally:
        if shown is not None:
            shown.clear()
    return Frontier(found, speeds)


class _Line:
    """Shows the point that is learned, and how far it is."""

    def __init__(self) -> None:
        self._line, self._start = StatusLine(), ""

    def __call__(self, event: Start | Estimate | Report | Point) -> None:
        if isinstance(event, Start):
            self._start = str(event)
        elif isinstance(event, Estimate):
            self._line.show(f"{self._start}: learning ... {event}")
        elif isinstance(event, Report):
            share = event.seconds / max(event.seconds + event.seconds_left, 1e-9)
            self._line.show(f"{self._start}: learning {bar(share)} step {event.step}, {event}")
        else:
            self.clear()

    def clear(self) -> None:
        """Remove the line."""
        self._line.clear()


def _check_speeds(plan: SpeedPlan) -> None:
    """Raise `OptionError` if masks make the network slower: there is no point that is faster than another."""
    if plan.faster and plan.sparse_ms >= plan.unmasked_ms:
        raise OptionError(
            f"a frontier needs a plan in which masks save time; on {plan.device}, {plan.dtype}, batch {plan.batch} "
            f"{plan.verdict}"
        )


def _uninterrupted(model: nn.Module, data: Any, **options: Any) -> MaskSet:
    """The masks that `learn` returns; raises `KeyboardInterrupt` if Ctrl-C ended it early."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "interrupted after", LearningWarning)  # of a run that cannot be resumed
        masks = learn(model, data, **options)
    if masks.recipe["ended"] == "interrupted":
        raise KeyboardInterrupt
    return masks


def _thinned(order: Sequence[str], plan: SpeedPlan, points: int) -> list[list[str]]:
    """The layers that stay masked at each point after the first, in equal steps of the milliseconds that masks save."""
    saved = {name: plan[name].saved_ms if name in plan else 0.0 for name in order}
    total = sum(saved.values())
    found: list[list[str]] = []
    left = list(order)
    for point in range(1, points):
        least = total * (points - point) / points
        if len(left) == 1:
            break
        left = left[1:]  # at least one, also if it saves more than a step
        while len(left) > 1 and sum(saved[name] for name in left[1:]) >= least:
            left = left[1:]
        found.append(left)
    return found


def _point(masks: MaskSet, plan: SpeedPlan) -> Point:
    quality = masks.recipe["quality"]
    ends = quality.get("agreement_interval")
    return Point(
        masks,
        plan.ms(masks),
        plan.speedup(masks),
        quality.get("agreement"),
        quality.get("kl"),
        quality.get("images"),
        None if ends is None else (ends[0], ends[1]),
    )
