"""Several mask files side by side: how far each agrees with the dense network, and how fast it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halve.errors import MaskError
from halve.masks.file import SUFFIX
from halve.masks.mask import MaskSet
from halve.report import figures as f
from halve.report.agreed import Agreed
from halve.report.chart import Series, axis_of, chart
from halve.report.tables import Cell, amount, label, table
from halve.report.timings import Timings

_LONGEST = 20  # characters of a name beside a dot


@dataclass(frozen=True)
class Candidate:
    """Masks with their name, and what is known of them."""

    name: str
    masks: MaskSet
    agreed: Agreed | None
    timings: Timings | None

    @property
    def ms(self) -> float | None:
        """Milliseconds of the network, by the plan."""
        plan = self.timings.plan if self.timings else None
        return None if plan is None else plan.ms(self.masks)


def comparison(candidates: Sequence[Candidate]) -> str:
    """A table of mask files, the first one being what the page is about."""
    first = candidates[0].masks
    shares = [one.agreed for one in candidates]
    columns: dict[str, list[Cell]] = {
        "masks": [label(Path(one.name).name, "name") for one in candidates],
        ">layers": [amount(f.count(len(one.masks)), len(one.masks)) for one in candidates],
        ">weights": [amount(f.count(one.masks.weights), one.masks.weights) for one in candidates],
        ">kept": [amount(f.percent(one.masks.density), one.masks.density) for one in candidates],
    }
    if any(shares):
        columns[">agreement"] = [
            amount(f.percent(a.share if a else None), a.share if a else None, 1.0, "sparse") for a in shares
        ]
        columns["95 % interval"] = [label(f.ends(a.ends) if a and a.ends else "-") for a in shares]
        columns[">KL"] = [amount(f.small(a.kl if a else None), a.kl if a else None) for a in shares]
    if any(one.ms is not None for one in candidates):
        columns[">ms, estimated"] = [amount(f.ms(one.ms), one.ms) for one in candidates]
        columns[">speed-up"] = [_speedup(one) for one in candidates]
    columns[">blocks unlike the first"] = [_difference(first, one.masks) for one in candidates]
    rows = [("", list(cells)) for cells in zip(*columns.values(), strict=True)]
    return table("Mask files", list(columns), rows) + frontier(candidates)


def frontier(candidates: Sequence[Candidate]) -> str:
    """Agreement against time, with the dense network; nothing if fewer than two mask files have both."""
    dots = _dots(candidates)
    if len(dots) < 2:
        return ""
    plan = next(one.timings.plan for one in candidates if one.timings and one.timings.plan)
    points = [(ms, share) for ms, share, _ in dots]
    unmasked = [(plan.unmasked_ms, 100.0), (plan.dense_ms, 100.0)]
    everything = [*points, *unmasked]
    least = min(share for _, share in everything)
    said = [(ms, f"{name}: {share:.1f} % of predictions unchanged at {f.ms(ms)} ms") for ms, share, name in dots]
    said.append((plan.unmasked_ms, f"compiled without masks: {f.ms(plan.unmasked_ms)} ms"))
    said.append((plan.dense_ms, f"dense: {f.ms(plan.dense_ms)} ms"))
    x = axis_of([0.95 * min(ms for ms, _ in everything), 1.03 * max(ms for ms, _ in everything)])
    return chart(
        "Agreement against time",
        [
            Series("", "sparse", points, [_short(name) for _, _, name in dots]),
            Series("", "dense", unmasked, ["no masks", "dense"]),
        ],
        x,
        axis_of([least - 0.1 * max(100 - least, 1.0), 100.0], " %"),
        said=sorted(said),
        summary="; ".join(say for _, say in sorted(said)),
        under=f"ms per batch of {plan.batch}, {plan.dtype}, {plan.device}, estimated from the times of the layers",
    )


def _dots(candidates: Sequence[Candidate]) -> list[tuple[float, float, str]]:
    found = [(one.ms, one.agreed, one.name) for one in candidates]
    return sorted((ms, 100 * agreed.share, name) for ms, agreed, name in found if ms is not None and agreed is not None)


def _short(name: str) -> str:
    """A name that fits beside a dot."""
    short = Path(name).name.removesuffix(SUFFIX)
    return short if len(short) <= _LONGEST else f"{short[: _LONGEST - 3]}..."


def _speedup(one: Candidate) -> Cell:
    plan = one.timings.plan if one.timings else None
    value = None if plan is None else plan.speedup(one.masks)
    return amount("-" if value is None else f"{value:.2f}x", value)


def _difference(first: MaskSet, masks: MaskSet) -> Cell:
    shared: Mapping[str, None] = dict.fromkeys(name for name in first if name in masks)
    one, other = (given.without(set(given) - shared.keys()) for given in (first, masks))
    try:
        value = one.difference(other) if shared else None
    except MaskError:  # other patterns, layouts or channel orders: blocks cannot be compared
        value = None
    return amount(f.percent(value), value)
