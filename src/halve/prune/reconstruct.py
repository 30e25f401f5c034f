"""Reconstruction: choose codes so that each layer's outputs change as little as possible on calibration images.

Removing e from a row w changes its centred outputs by e C e^T, where C is the covariance of the layer's inputs. The
codes of a row interact through C, within blocks and between them, so they are improved by coordinate descent.

This alone weakens the outputs of every layer: e is a part of w, so usually e C w^T > 0. Frozen BatchNorm does not
compensate for it, and the losses multiply over the layers. Masks are therefore chosen sequentially while the network
runs: each row also pays for the error in the mean and the standard deviation of its outputs, given the inputs that the
masked layers before it produce. Recalibrated BatchNorm corrects both, so this cost is dropped if it will be used.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.batches import reiterable, tracked
from halve.masks.layout import Layout
from halve.masks.mask import Mask, wasteful
from halve.masks.pattern import Pattern
from halve.modules import kind_of, runs_torch_forward, weight_of
from halve.prune.coordinate_descent import Cost, coordinate_descent
from halve.prune.elementwise import WANDA, wanda_or_magnitude
from halve.prune.score import LayerScores, Score, ScoreInputs
from halve.prune.sequential import Drift, pick_sequentially, sample_of
from halve.prune.statistics import covariance, input_squares, layers_of, moments, summed
from halve.select.select import Choice

MAX_COLUMNS = 8192  # a larger C would take more than 256 MB; wider layers fall back to Wanda
MAX_TRIED = 128  # codes tried in each block
MEAN = 0.2  # cost of a row's squared error in the mean, relative to e C e^T
GAIN = 5.0  # cost of its squared error in the standard deviation
RIDGE = 0.3  # share of the inputs' mean variance added to each: a few hundred images are a small sample


def reconstruct(inputs: ScoreInputs) -> LayerScores:
    """1 for each weight that is kept and 0 for the others, by layer.

    Layers that cannot be reconstructed (transposed, very wide, or with an overridden forward) fall back to Wanda's
    scores, and layers that never run to their magnitudes.
    """
    model, choices, weights = inputs.model, inputs.choices, inputs.weights
    forward, progress = inputs.forward, inputs.progress
    generator = torch.Generator().manual_seed(inputs.seed)
    data = reiterable(inputs.data)
    able = {choice.name for choice in choices if all(map(can_reconstruct, layers_of(model, choice)))}

    def measure(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return moments(module, input, generator)

    totals, images = summed(model, [c for c in choices if c.name in able], data, measure, forward, progress)
    others = [choice for choice in choices if choice.name not in able]
    squares: dict[str, Tensor] = {}
    if others:
        squares, images = input_squares(model, others, data, forward, progress)
    starts = {}
    for choice in choices:
        name, (layout, pattern) = choice.name, _rule(choice)
        if name in totals:
            squares[name] = squares_of(totals[name], layout)
        starts[name] = Mask.from_scores(pattern, layout, wanda_or_magnitude(weights[name], squares.pop(name, None)))
    known = {c.name: starts[c.name].kept() for c in choices if c.name not in totals or _rule(c)[1].count > MAX_TRIED}
    chosen: dict[str, Tensor] = {}
    bar = iter(tracked([c for c in choices if c.name not in known], progress, "reconstruction"))

    def pick(choice: Choice, drift: Drift | None) -> Tensor:
        next(bar, None)
        name, (layout, pattern) = choice.name, _rule(choice)
        start, total = starts[name].codes, totals.pop(name)
        codes = choose(weights[name], layout, pattern, total, start, drift, inputs.recalibrated)
        return chosen.setdefault(name, Mask(pattern, layout, codes).kept())

    if not inputs.recalibrated:
        pick_sequentially(model, choices, known, pick, sample_of(data, forward), forward)
    for choice in choices:  # including layers that only run on other batches
        if choice.name not in known and choice.name not in chosen:
            pick(choice, None)
    next(bar, None)  # completes the progress display
    return LayerScores({name: kept.to(weights[name].dtype) for name, kept in (known | chosen).items()}, images)


RECONSTRUCT = Score(
    "reconstruct",
    "whole masks that change each layer's outputs least; needs data",
    reconstruct,
    needs_data=True,
    whole_masks=True,
    search_score=WANDA,
)


def can_reconstruct(module: nn.Module) -> bool:
    """Whether a layer can be reconstructed: not transposed, with PyTorch's own forward, and not too wide."""
    if kind_of(module) not in ("linear", "conv") or not runs_torch_forward(module):
        return False
    return weight_of(module)[0].numel() <= MAX_COLUMNS


def squares_of(totals: Tensor, layout: Layout) -> Tensor:
    """The summed squares of each weight's inputs, in the weight's shape: the diagonals of summed `moments`."""
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
    """Choose codes, (rows, blocks), for one layer.

    Args:
        weight: The weight.
        layout: Its layout.
        pattern: Its pattern.
        totals: Summed `moments` of its inputs.
        start: Codes that the descent starts from.
        drift: How earlier masks change the layer's inputs and outputs, if known.
        recalibrated: Whether BatchNorm will be recalibrated, which corrects the outputs' mean and variance.
    """
    table = pattern.table().to(weight.device)
    refused = wasteful(pattern, layout).to(weight.device) if layout.virtual else None
    costs = costs_of(weight, layout, totals, drift, recalibrated)
    codes = start.to(weight.device).long().chunk(layout.groups)
    found = [
        coordinate_descent(rows, codes[group], cost, columns_of_blocks(layout, group).to(weight.device), table, refused)
        for group, (rows, cost) in enumerate(zip(rows_of(weight, layout), costs, strict=True))
    ]
    return torch.cat(found)


def rows_of(weight: Tensor, layout: Layout) -> Tensor:
    """The weight as (groups, rows, columns + 1). The last column is zero and stands for virtual places."""
    columns = layout.channels * layout.positions
    return F.pad(weight.detach().float().reshape(layout.groups, -1, columns), (0, 1))


def costs_of(
    weight: Tensor, layout: Layout, totals: Tensor, drift: Drift | None = None, recalibrated: bool = False
) -> list[Cost]:
    """The cost of removing weights, for each group.

    With inputs x of the masked network, the mean of a row's outputs is off by `missing` + e mean(x)^T and the variance
    by about (1 - strength) w C w^T + 2 e C w^T, so the standard deviation by half of that, divided by itself.
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
        floor = 1e-6 * (rows[:, :-1].square() @ total.diagonal()[:-1]) / total[-1, -1] + 1e-30  # rounding error
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
    """The columns of each block of a group's rows, (blocks, M). A virtual place is the column after the last."""
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
