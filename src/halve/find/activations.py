"""What flows into the layers: the summed squares of the inputs that each weight column is multiplied with."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.errors import DataError
from halve.find.batches import Forward, Progress, images_of, iterate, run
from halve.find.select import Choice
from halve.masks.layers import clone, kind_of


def input_squares(
    model: nn.Module,
    choices: Sequence[Choice],
    data: Any,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """For each layer that runs, sum over images and output positions of x^2, shape (input channels, *kernel); and how
    many images were seen. A convolution's border is counted exactly: a padded zero adds nothing.
    """
    copy = clone(model).eval()
    squares: dict[str, Tensor] = {}
    images = 0
    with _watching(copy, choices, squares), torch.no_grad():
        for batch in iterate(data, progress, "activations"):
            output = run(copy, batch, forward)
            images += len(images_of(batch)) if forward is None else len(output)
    for name, value in squares.items():
        if not bool(value.isfinite().all()):
            raise DataError(f"layer {name} gets NaN or infinite inputs: check the images and their normalisation")
    return squares, images


@contextmanager
def _watching(model: nn.Module, choices: Sequence[Choice], squares: dict[str, Tensor]) -> Iterator[None]:
    def watch(name: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            seen = column_squares(module, x.detach())
            squares[name] = squares[name] + seen if name in squares else seen

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    handles = [watch(c.name, model.get_submodule(name)) for c in choices for name in (c.name, *c.shared_with)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def column_squares(module: nn.Module, x: Tensor) -> Tensor:
    """Sum of squares of what each (input channel, kernel position) of the layer is multiplied with, for inputs x."""
    if kind_of(module) == "linear":
        return x.double().square().reshape(-1, x.shape[-1]).sum(0)
    size = cast(tuple[int, ...], module.kernel_size)
    if x.dim() == len(size) + 1:
        x = x[None]
    if kind_of(module) == "conv":
        x = _padded(module, x)
    energy = x.double().square().sum(0)
    result = energy.new_zeros(energy.shape[0], *size)
    for offset in itertools.product(*map(range, size)):
        index: tuple[slice | int, ...] = (slice(None), *offset)
        result[index] = _window(module, energy, offset).flatten(1).sum(1)
    return result


def _window(module: Any, energy: Tensor, offset: Sequence[int]) -> Tensor:
    """The input pixels that meet the kernel position `offset` somewhere in the output."""
    index = [slice(None)]
    for axis, at in enumerate(offset):
        extent, step, dilation = energy.shape[axis + 1], module.stride[axis], module.dilation[axis]
        if kind_of(module) == "conv":
            outputs = (extent - dilation * (module.kernel_size[axis] - 1) - 1) // step + 1
            index.append(slice(at * dilation, at * dilation + step * (outputs - 1) + 1, step))
        else:  # pixel i goes to output i * step + at * dilation - padding, where the padding crops
            shift = at * dilation - module.padding[axis]
            reach = dilation * (module.kernel_size[axis] - 1) - 2 * module.padding[axis] + module.output_padding[axis]
            outputs = (extent - 1) * step + reach + 1
            index.append(slice(max(0, math.ceil(-shift / step)), max(0, math.floor((outputs - 1 - shift) / step) + 1)))
    return energy[tuple(index)]


def _padded(module: Any, x: Tensor) -> Tensor:
    if module.padding == "valid":
        return x
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        pairs = [(t // 2, t - t // 2) for t in total]
    else:
        pairs = [(p, p) for p in module.padding]
    flat = [amount for pair in reversed(pairs) for amount in pair]
    return F.pad(x, flat, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
