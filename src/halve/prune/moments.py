"""First and second moments of what a layer's weights are multiplied with, and of what the layer gives."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.modules import kind_of
from halve.prune.statistics import column_sums

_POSITIONS = 196  # output positions that one image contributes at most: neighbours say nearly the same


def moments(module: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Summed products of each group's inputs and a one, (groups, columns + 1, columns + 1), columns as in the weight.

    So the last column holds the sums of the inputs, and the corner says how many samples there were.

    >>> moments(nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.Generator()).tolist()
    [[[10.0, 2.0, 4.0], [2.0, 4.0, 2.0], [4.0, 2.0, 2.0]]]
    """
    if kind_of(module) == "linear":
        rows = x.detach().reshape(1, -1, x.shape[-1])
    else:
        rows = _patches(module, x.detach(), generator)
    rows = F.pad(rows, (0, 1), value=1.0)
    return rows.transpose(1, 2) @ rows


def covariance(total: Tensor) -> Tensor:
    """The covariance of one group's inputs, from what `moments` gave, summed.

    >>> covariance(torch.tensor([[10.0, 2.0, 4.0], [2.0, 4.0, 2.0], [4.0, 2.0, 2.0]])).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    mean = total[:-1, -1] / total[-1, -1]
    return total[:-1, :-1] / total[-1, -1] - torch.outer(mean, mean)


class Spread(NamedTuple):
    """Mean and variance of each output channel."""

    mean: Tensor
    variance: Tensor


def spread(module: nn.Module, output: Tensor) -> Spread:
    """Of a layer's output, over images and positions.

    >>> spread(nn.Linear(4, 2), torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    Spread(mean=tensor([2., 0.]), variance=tensor([1., 0.]))
    """
    axis = -1 if kind_of(module) == "linear" else -1 - len(module.kernel_size)  # type: ignore[arg-type]
    channels = output.detach().movedim(axis, 0).flatten(1)
    return Spread(channels.mean(1), channels.var(1, correction=0))


def column_means(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    """The mean of what each weight of a row is multiplied with, (groups, columns); `output` is the layer's on x.

    >>> layer, x = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    >>> column_means(layer, x, layer(x)).tolist()
    [[2.0, 1.0]]
    """
    sums, groups = column_sums(module, x), getattr(module, "groups", 1)
    return sums.reshape(groups, len(sums) // groups, -1)[:, 0] / (output.numel() / len(sums))


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
