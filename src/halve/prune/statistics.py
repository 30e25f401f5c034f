"""What flows into layers and out of them: moments of the inputs of each weight, and of the outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.batches import Forward, Progress, count_of, iterate, result_of
from halve.errors import DataError
from halve.modules import clone, kind_of, plain_weight_
from halve.select.select import Choice

Measure = Callable[..., Tensor]  # called with a layer and its inputs; the results are summed over all batches
_POSITIONS = 196  # output positions sampled per image, at most: neighbouring positions are almost the same


def input_squares(
    model: nn.Module,
    choices: Sequence[Choice],
    data: Any,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """For each layer that runs, the sum of x^2 over all inputs x of each weight; and the number of images."""
    return summed(model, choices, data, column_squares, forward, progress)


@torch.inference_mode(False)
def summed(
    model: nn.Module,
    choices: Sequence[Choice],
    data: Any,
    measure: Measure,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """The sum of `measure` over the data for each layer that runs; and the number of images."""
    copy = measuring_copy(model)
    totals: dict[str, Tensor] = {}
    images = 0
    with _measuring(copy, choices, measure, totals), torch.no_grad():
        for batch in iterate(data, progress, "activations"):
            result = result_of(copy, batch, forward)
            images += count_of(batch, result, forward)
    for name, value in totals.items():
        check_finite(name, value)
    return totals, images


def check_finite(name: str, *values: Tensor) -> None:
    """Raise if what was measured at a layer is not finite."""
    if not all(bool(value.isfinite().all()) for value in values):
        raise DataError(f"layer {name} gets NaN or infinite inputs: check the images and their normalisation")


def measuring_copy(model: nn.Module) -> nn.Module:
    """A copy to measure on, in eval mode; half-precision models become float32."""
    copy = clone(model).eval()
    if next((p.dtype for p in copy.parameters()), None) in (torch.float16, torch.bfloat16):
        copy.float()  # sums of squares overflow half precision
    return copy


@contextmanager
def hooked(copy: nn.Module, choices: Sequence[Choice], register: Callable[[Choice, nn.Module], Any]) -> Iterator[None]:
    """Call `register` for each layer that uses a chosen weight, and remove the hooks that it returns in the end."""
    handles = [register(choice, layer) for choice in choices for layer in layers_of(copy, choice)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: nn.Module, choice: Choice) -> list[nn.Module]:
    """The layers that use the weight of a choice."""
    return [model.get_submodule(name) for name in (choice.name, *choice.shared_with)]


def _measuring(copy: nn.Module, choices: Sequence[Choice], measure: Measure, totals: dict[str, Tensor]) -> Any:
    def register(choice: Choice, layer: nn.Module) -> Any:
        plain_weight_(layer)  # so that a gradient with respect to it can be taken

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_empty(*args, **kwargs):
                return
            seen = measure(module, *args, **kwargs)
            totals[choice.name] = totals[choice.name] + seen if choice.name in totals else seen

        return layer.register_forward_pre_hook(hook, with_kwargs=True)

    return hooked(copy, choices, register)


def is_empty(input: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether a layer got nothing: a detector may find no region to look at."""
    return input.numel() == 0


def column_squares(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """For each weight of the layer, the sum of squares of all inputs that it is multiplied by.

    >>> column_squares(nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]])).tolist()
    [[10.0, 4.0]]
    """
    return column_sums(module, input.detach().square(), *args, **kwargs)


def column_sums(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """For each weight of the layer, the sum of all inputs that it is multiplied by.

    A layer is linear in its weight, so this sum is the gradient of the summed output with respect to the weight,
    whatever strides, padding, dilation and groups the layer has.

    >>> column_sums(nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]])).tolist()
    [[4.0, 2.0]]
    """
    x = input.detach()
    if kind_of(module) == "linear":
        x = x.reshape(-1, x.shape[-1])
    elif x.dim() == len(cast(tuple[int, ...], module.kernel_size)) + 1:
        x = x[None]
    weight = cast(Tensor, module.weight)
    trained = weight.requires_grad
    try:
        weight.requires_grad_(True)
        with torch.enable_grad():
            output: Tensor = module.forward(x.sum(0, keepdim=True), *args, **kwargs)
            (sums,) = torch.autograd.grad(output.sum(), weight)
    finally:
        weight.requires_grad_(trained)
    return sums


def column_means(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    """The mean input of each weight of a row, (groups, columns). `output` is the layer's output on x.

    >>> layer, x = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    >>> column_means(layer, x, layer(x)).tolist()
    [[2.0, 1.0]]
    """
    sums, groups = column_sums(module, x), getattr(module, "groups", 1)
    return sums.reshape(groups, len(sums) // groups, -1)[:, 0] / (output.numel() / len(sums))


def moments(module: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Second moments of each group's inputs, extended by a constant one: (groups, columns + 1, columns + 1).

    Columns are ordered as in the weight. The last column holds the sums of the inputs, and its last entry the number of
    samples.

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
    """The covariance of one group's inputs, from its summed `moments`.

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
    """Mean and variance of each channel of a layer's output, over images and positions.

    >>> spread(nn.Linear(4, 2), torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    Spread(mean=tensor([2., 0.]), variance=tensor([1., 0.]))
    """
    axis = -1 if kind_of(module) == "linear" else -1 - len(module.kernel_size)  # type: ignore[arg-type]
    channels = output.detach().movedim(axis, 0).flatten(1)
    return Spread(channels.mean(1), channels.var(1, correction=0))


def _patches(module: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs of the weights at a sample of output positions, (groups, samples, columns)."""
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
