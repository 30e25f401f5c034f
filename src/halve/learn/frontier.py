"""Several sets of masks, from the fastest network to the most accurate one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

from halve.batches import Forward, Progress
from halve.errors import DataError, OptionError
from halve.learn.accuracy_budget import by_worth, costs_of
from halve.learn.held_back import chosen_from, hold_back, hold_back_none
from halve.learn.learn import learn, options_to_relearn
from halve.markup import table
from halve.masks.mask import MaskSet
from halve.modules import unwrapped
from halve.process_state import preserved_process_state
from halve.select.speed_plan import SpeedPlan, load_plan
from halve.text import aligned

POINTS = 5
COLUMNS = ("layers masked", "weights", "ms", "speed-up", "agreement", "KL")


@dataclass(frozen=True)
class Point:
    """Masks, with the time of the network that the plan estimates, and what they preserve on images held back."""

    masks: MaskSet
    ms: float
    speedup: float
    agreement: float | None
    kl: float | None

    def cells(self) -> tuple[str, ...]:
        """The point as table cells, one per column in `COLUMNS`."""
        weights = sum(mask.layout.weights for mask in self.masks.values())
        agreement = "-" if self.agreement is None else f"{100 * self.agreement:.1f} %"
        kl = "-" if self.kl is None else f"{self.kl:.4f}"
        return (str(len(self.masks)), f"{weights:,}", f"{self.ms:.3f}", f"{self.speedup:.2f} x", agreement, kl)


class Frontier(Sequence[Point]):
    """Points from the fastest to the most accurate. Prints as a table."""

    def __init__(self, points: Sequence[Point], plan: SpeedPlan) -> None:
        self._points, self.plan = tuple(points), plan

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
    def _title(self) -> str:
        return f"{self.plan.device}, {self.plan.dtype}, batch {self.plan.batch}; {self.plan.summary}"

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
    forward: Forward | None = None,
    progress: Progress = True,
    **options: Any,
) -> Frontier:
    """Learn masks at several speeds: each point leaves more layers dense, those whose masks save least for their cost.

    The first point masks every layer that is faster sparse. Each further point is learned on from the one before, for
    a quarter of its steps. A layer's cost is the KL divergence of the outputs when it alone is masked.

    Args:
        model: The trained network. It is not changed.
        data: Batches of images, as for `halve.learn`.
        plan: What `halve.measure` found on the machine that the network will run on, or the file it was saved to.
        points: Number of points. Default: 5.
        validation: Images to measure agreement on. Default: some are held back, as in `halve.learn`.
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
    speeds = plan if isinstance(plan, SpeedPlan) else load_plan(plan)
    seed = options.get("seed", 0)
    split = hold_back(data, seed) if validation is None else hold_back_none(data, seed)
    images = list(split.held_back if validation is None else chosen_from(validation, seed))
    if not images:
        raise DataError(f"a frontier needs images to measure agreement on: {split.reason}; pass validation=")
    if split.kind == "iterator":
        raise DataError("a frontier reads the data several times: pass a list, a tensor or a DataLoader")
    common: dict[str, Any] = {"validation": images, "forward": forward, "progress": progress}
    masks = learn(model, split.data, plan=speeds, **common, **options)
    costs = costs_of(model, masks, images, forward=forward, progress=progress)
    order = by_worth(costs, speeds)
    steps = masks.recipe["steps_done"]
    found = [_point(masks, speeds)]
    for left in _thinned(order, speeds, points):
        start = masks.without(set(masks) - set(left))
        masks = learn(model, split.data, **common, **options_to_relearn(options, start, steps))
        dense = {name: costs[name] for name in order if name not in left}
        found.append(_point(masks.with_recipe(left_dense=dense), speeds))
    return Frontier(found, speeds)


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
    return Point(masks, plan.ms(masks), plan.speedup(masks), quality.get("agreement"), quality.get("kl"))
