"""Choose a layer's codes so that its outputs change least on calibration inputs.

With H = X X^T over the layer's unfolded inputs, removing the part e of a row w changes its outputs by e H e^T, summed
and squared. A row's codes interact through H, inside blocks and between them, so they are improved block by block: each
takes the code that is best given all others, for all rows at once, until nothing changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.find import scores
from halve.find.activations import input_squares, summed
from halve.find.batches import Forward, Progress
from halve.find.select import Choice
from halve.masks.layers import kind_of, runs_as_is, weight_of
from halve.masks.layout import Layout
from halve.masks.mask import Mask, wasteful
from halve.masks.pattern import Pattern

MAX_COLUMNS = (
    8192  # a larger H would take more than 256 MB; such layers fall back to their magnitudes times input norms
)
MAX_TRIED = 128  # candidates that are tried in each block
SWEEPS = 6
_POSITIONS = 196  # output positions that one image contributes at most: neighbours say nearly the same


def reconstruct(
    model: nn.Module,
    choices: Sequence[Choice],
    weights: Mapping[str, Tensor],
    data: Any,
    *,
    seed: int = 0,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """For each layer 1 where a weight is kept and 0 where not; and how many images were seen.

    Layers that cannot be reconstructed (transposed, very wide, with a forward of their own) get Wanda's scores instead,
    and layers that never ran their magnitudes.
    """
    generator = torch.Generator().manual_seed(seed)
    able = {c.name for c in choices if all(fits(model.get_submodule(name)) for name in (c.name, *c.shared_with))}

    def measure(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return gram(module, input, generator)

    wide = [choice for choice in choices if choice.name not in able]
    totals, images = summed(model, [c for c in choices if c.name in able], data, measure, forward, progress)
    if wide:
        squares, images = input_squares(model, wide, data, forward, progress)
        totals |= squares
    found = {}
    track = progress or (lambda items, _: items)
    for choice in track(choices, "reconstruction"):
        name, layout, pattern = choice.name, choice.layout, choice.pattern
        assert layout is not None
        assert pattern is not None
        weight, total = weights[name], totals.pop(name, None)
        if total is None:
            found[name] = scores.magnitude(weight)
        elif name not in able:
            found[name] = scores.wanda(weight, total)
        else:
            start = scores.wanda(weight, squares_of(total, layout))
            found[name] = start
            if pattern.count <= MAX_TRIED:
                kept, _ = choose(weight, layout, pattern, total, Mask.from_scores(pattern, layout, start).kept())
                found[name] = kept.to(weight.dtype)
    return found, images


def fits(module: nn.Module) -> bool:
    """Whether a layer can be reconstructed: not transposed, run as PyTorch runs it, and not too wide."""
    return kind_of(module) in ("linear", "conv") and runs_as_is(module) and weight_of(module)[0].numel() <= MAX_COLUMNS


def squares_of(grams: Tensor, layout: Layout) -> Tensor:
    """The summed squares of each weight's inputs, in the weight's shape: the diagonals of H."""
    diagonal = grams.diagonal(dim1=1, dim2=2)[:, None, :]
    return diagonal.expand(-1, layout.rows // layout.groups, -1).reshape(layout.shape)


def gram(module: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """H of each group, (groups, columns, columns), columns as they lie in a row of the weight.

    >>> gram(nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.Generator()).tolist()
    [[[10.0, 2.0], [2.0, 4.0]]]
    """
    if kind_of(module) == "linear":
        rows = x.detach().reshape(1, -1, x.shape[-1])
    else:
        rows = _patches(module, x.detach(), generator)
    return rows.transpose(1, 2) @ rows


def choose(weight: Tensor, layout: Layout, pattern: Pattern, grams: Tensor, start: Tensor) -> tuple[Tensor, float]:
    """Kept (bool, of the weight's shape), and the relative squared error of the outputs; begins at `start`."""
    rows = layout.rows // layout.groups
    columns = layout.channels * layout.positions
    table = pattern.table().to(weight.device)
    w = _padded(weight.detach().float().reshape(layout.groups, rows, columns))
    kept = _padded(start.to(weight.device).reshape(layout.groups, rows, columns))
    removed = torch.zeros((), device=weight.device)
    total = torch.zeros((), device=weight.device)
    for group in range(layout.groups):
        h = F.pad(grams[group].to(weight.device, torch.float32), (0, 1, 0, 1))
        blocks = _columns_of_blocks(layout, group).to(weight.device)
        kept[group] = _descend(w[group], kept[group], h, blocks, table, layout, pattern)
        error = w[group] * ~kept[group]
        removed = removed + ((error @ h) * error).sum()
        total = total + ((w[group] @ h) * w[group]).sum()
    return kept[..., :columns].reshape(layout.shape), float(removed / total.clamp(min=1e-30))


def _descend(
    w: Tensor, kept: Tensor, h: Tensor, blocks: Tensor, table: Tensor, layout: Layout, pattern: Pattern
) -> Tensor:
    error = w * ~kept
    pull = error @ h
    refused = wasteful(pattern, layout).to(w.device) if layout.virtual else None
    for _ in range(SWEEPS):
        changed = torch.zeros((), dtype=torch.bool, device=w.device)
        for index, block in enumerate(blocks):
            inner = h[block][:, block]
            now = error[:, block]
            candidates = w[:, block][:, None, :] * ~table
            outside = pull[:, block] - now @ inner
            cost = ((candidates @ inner + 2 * outside[:, None, :]) * candidates).sum(-1)
            if refused is not None:
                cost = cost.masked_fill(refused[index], float("inf"))
            code = cost.argmin(1)
            best = candidates[torch.arange(len(code), device=w.device), code]
            step = best - now
            changed |= (step != 0).any()
            pull += step @ h[block]
            error[:, block] = best
            kept[:, block] = table[code]
        if not bool(changed):
            break
    return kept


def _patches(module: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """What the weights are multiplied with, (groups, samples, columns): a sample of output positions of each image."""
    conv: nn.Conv2d = module  # type: ignore[assignment]
    spatial = len(conv.kernel_size)
    if x.dim() == spatial + 1:
        x = x[None]
    x = F.pad(x, _pad_widths(conv), mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    outputs = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(x.shape[2:], conv.kernel_size, conv.stride, conv.dilation, strict=True)
    ]
    count = int(torch.tensor(outputs).prod())
    chosen = torch.randperm(count, generator=generator)[:_POSITIONS] if count > _POSITIONS else torch.arange(count)
    starts = torch.unravel_index(chosen, outputs)
    offsets = torch.cartesian_prod(*(torch.arange(k) for k in conv.kernel_size)).reshape(-1, spatial).unbind(1)
    index = [
        (start[:, None] * s + offset[None, :] * d).to(x.device)
        for start, offset, s, d in zip(starts, offsets, conv.stride, conv.dilation, strict=True)
    ]
    where: tuple[slice | Tensor, ...] = (slice(None), slice(None), *index)
    patches = x[where]  # (images, channels, positions, kernel)
    images, channels, positions, kernel = patches.shape
    grouped = patches.reshape(images, conv.groups, channels // conv.groups, positions, kernel)
    return grouped.permute(1, 0, 3, 2, 4).reshape(conv.groups, images * positions, -1)


def _pad_widths(conv: nn.Conv2d) -> list[int]:
    if conv.padding == "valid":
        return [0] * (2 * len(conv.kernel_size))
    if conv.padding == "same":
        spans = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        pairs = [(span // 2, span - span // 2) for span in spans]
    else:
        pairs = [(int(width), int(width)) for width in conv.padding]
    return [width for pair in reversed(pairs) for width in pair]


def _columns_of_blocks(layout: Layout, group: int) -> Tensor:
    """For each block of a group's rows the columns in it, (blocks, M); a virtual place is the column after the last."""
    columns, channels = layout.channels * layout.positions, layout.channels
    row = torch.arange(columns, dtype=torch.float64).reshape(1, *layout.shape[1:])
    order = layout.channel_order
    if order is not None:
        order = order[group * channels : (group + 1) * channels]
    single = Layout(layout.kind, tuple(row.shape), layout.block, 1, layout.order, layout.pad, order)
    return single.to_blocks(row, fill=columns)[0].long()


def _padded(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 1))
