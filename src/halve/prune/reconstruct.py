"""Choose the layers' codes so that outputs change least on calibration inputs.

Removing the part e of a row w changes its centred outputs by e C e^T, C being the covariance of the layer's inputs. A
row's codes interact through C, inside blocks and between them, so they are improved block by block (`descend`).

Alone that makes the outputs of every layer weaker: e is a part of w and mostly pulls the same way, e C w^T > 0. Frozen
BatchNorm does not make up for it, and over the layers it multiplies. So masks are chosen while the network runs
(`cascade`): each row also pays for what the mean and the standard deviation of its outputs are off with the inputs that
the masked layers before it give. Where BatchNorm will be recalibrated, which makes up for both, it does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.batches import Forward, Progress
from halve.masks.layout import Layout
from halve.masks.mask import Mask, wasteful
from halve.masks.pattern import Pattern
from halve.modules import kind_of, runs_as_is, weight_of
from halve.prune import scores
from halve.prune.coordinate_descent import Cost, descend
from halve.prune.moments import covariance, moments
from halve.prune.sequential import Drift, cascade, sample_of
from halve.prune.statistics import input_squares, summed
from halve.select.select import Choice

MAX_COLUMNS = (
    8192  # a larger C would take more than 256 MB; such layers fall back to their magnitudes times input norms
)
MAX_TRIED = 128  # candidates that are tried in each block
MEAN = 0.2  # what a row pays for the square of its mean's error, where e C e^T costs 1
GAIN = 5.0  # and for the square of its standard deviation's
RIDGE = 0.3  # of the mean variance of the inputs, added to each: a few hundred images do not show all that may come


def reconstruct(
    model: nn.Module,
    choices: Sequence[Choice],
    weights: Mapping[str, Tensor],
    data: Any,
    *,
    recalibrated: bool = False,
    seed: int = 0,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """For each layer 1 where a weight is kept and 0 where not; and how many images were seen.

    `recalibrated` says that BatchNorm statistics will be measured with the masks on. Layers that cannot be
    reconstructed (transposed, very wide, with a forward of their own) get Wanda's scores instead, and layers that never
    ran their magnitudes.
    """
    generator = torch.Generator().manual_seed(seed)
    data = list(data) if isinstance(data, Iterator) else data  # it is run over more than once
    able = {c.name for c in choices if all(fits(model.get_submodule(name)) for name in (c.name, *c.shared_with))}

    def measure(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return moments(module, input, generator)

    totals, images = summed(model, [c for c in choices if c.name in able], data, measure, forward, progress)
    wide = [choice for choice in choices if choice.name not in able]
    squares: dict[str, Tensor] = {}
    if wide:
        squares, images = input_squares(model, wide, data, forward, progress)
    starts = {}
    for choice in choices:
        name, (layout, pattern) = choice.name, _rule(choice)
        if name in totals:
            squares[name] = squares_of(totals[name], layout)
        score = scores.wanda(weights[name], squares.pop(name)) if name in squares else scores.magnitude(weights[name])
        starts[name] = Mask.from_scores(pattern, layout, score)
    known = {c.name: starts[c.name].kept() for c in choices if c.name not in totals or _rule(c)[1].count > MAX_TRIED}
    chosen: dict[str, Tensor] = {}
    track = progress or (lambda items, _: items)
    bar = iter(track([c for c in choices if c.name not in known], "reconstruction"))

    def pick(choice: Choice, drift: Drift | None) -> Tensor:
        next(bar, None)
        name, (layout, pattern) = choice.name, _rule(choice)
        codes = choose(weights[name], layout, pattern, totals.pop(name), starts[name].codes, drift, recalibrated)
        return chosen.setdefault(name, Mask(pattern, layout, codes).kept())

    if not recalibrated:
        cascade(model, choices, known, pick, sample_of(data, forward), forward)
    for choice in choices:  # also a layer that runs on other batches alone
        if choice.name not in known and choice.name not in chosen:
            pick(choice, None)
    next(bar, None)  # its end
    return {name: kept.to(weights[name].dtype) for name, kept in (known | chosen).items()}, images


def fits(module: nn.Module) -> bool:
    """Whether a layer can be reconstructed: not transposed, run as PyTorch runs it, and not too wide."""
    return kind_of(module) in ("linear", "conv") and runs_as_is(module) and weight_of(module)[0].numel() <= MAX_COLUMNS


def squares_of(totals: Tensor, layout: Layout) -> Tensor:
    """The summed squares of each weight's inputs, in the weight's shape: the diagonals of what `moments` gave."""
    diagonal = totals.diagonal(dim1=1, dim2=2)[:, None, :-1]
    return diagonal.expand(-1, layout.rows // layout.groups, -1).reshape(layout.shape)


def choose(
    weight: Tensor,
    layout: Layout,
    pattern: Pattern,
    totals: Tensor,
    start: Tensor,
    drift: Drift | None = None,
    recalibrated: bool = False,
) -> Tensor:
    """Codes, (rows, blocks), for what `moments` gave; begins at the codes `start`."""
    table = pattern.table().to(weight.device)
    refused = wasteful(pattern, layout).to(weight.device) if layout.virtual else None
    costs = costs_of(weight, layout, totals, drift, recalibrated)
    codes = start.to(weight.device).long().chunk(layout.groups)
    found = [
        descend(rows, codes[group], cost, columns_of_blocks(layout, group).to(weight.device), table, refused)
        for group, (rows, cost) in enumerate(zip(rows_of(weight, layout), costs, strict=True))
    ]
    return torch.cat(found)


def rows_of(weight: Tensor, layout: Layout) -> Tensor:
    """The weight as (groups, rows, columns + 1): the last column is zero, and what virtual places refer to."""
    columns = layout.channels * layout.positions
    return F.pad(weight.detach().float().reshape(layout.groups, -1, columns), (0, 1))


def costs_of(
    weight: Tensor, layout: Layout, totals: Tensor, drift: Drift | None = None, recalibrated: bool = False
) -> list[Cost]:
    """What it costs in each group to remove a part of its rows.

    With x the inputs in the masked network the mean of a row's outputs is off by `missing` + e mean(x)^T, and their
    variance by about (1 - strength) w C w^T + 2 e C w^T, so their standard deviation by half of that over itself.
    """
    mean, gain = (0.0, 0.0) if recalibrated else (MEAN, GAIN)
    costs = []
    for group, rows in enumerate(rows_of(weight, layout)):
        total = totals[group].to(weight.device, torch.float32)
        part = slice(group * len(rows), (group + 1) * len(rows))
        inputs, missing, strength = total[:-1, -1] / total[-1, -1], rows.new_zeros(len(rows)), rows.new_ones(len(rows))
        if drift is not None:
            inputs, missing, strength = drift.inputs[group], drift.missing[part], drift.strength[part]
        inputs = F.pad(inputs.to(rows), (0, 1))
        products = F.pad(covariance(total), (0, 1, 0, 1))
        along = rows @ products
        floor = 1e-6 * (rows[:, :-1].square() @ total.diagonal()[:-1]) / total[-1, -1] + 1e-30  # what rounding leaves
        variance = torch.maximum((along * rows).sum(1), floor)
        costs.append(
            Cost(
                products=_ridged(products) + mean * torch.outer(inputs, inputs),
                linear=mean * torch.outer(missing.to(rows), inputs),
                along=along,
                offset=variance * (1 - strength.to(rows)) / 2,
                weight=gain / variance,
            )
        )
    return costs


def _ridged(products: Tensor) -> Tensor:
    variances = products.diagonal()
    return products + torch.diag(torch.full_like(variances, RIDGE * float(variances[:-1].mean())))


def columns_of_blocks(layout: Layout, group: int) -> Tensor:
    """For each block of a group's rows the columns in it, (blocks, M); a virtual place is the column after the last."""
    columns, channels = layout.channels * layout.positions, layout.channels
    row = torch.arange(columns, dtype=torch.float64).reshape(1, *layout.shape[1:])
    order = layout.channel_order
    if order is not None:
        order = order[group * channels : (group + 1) * channels]
    single = Layout(layout.kind, tuple(row.shape), layout.block, 1, layout.order, layout.pad, order)
    return single.to_blocks(row, fill=columns)[0].long()


def _rule(choice: Choice) -> tuple[Layout, Pattern]:
    assert choice.layout is not None
    assert choice.pattern is not None
    return choice.layout, choice.pattern
