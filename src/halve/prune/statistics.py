"""What flows into the layers: the summed squares of the inputs that each weight is multiplied with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress, count_of, iterate, run
from halve.errors import DataError
from halve.modules import clone, kind_of, set_weight_, weight_of
from halve.select.select import Choice

Measure = Callable[..., Tensor]  # of (layer, *its inputs); what it gives is summed over all batches


def input_squares(
    model: nn.Module,
    choices: Sequence[Choice],
    data: Any,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """For each layer that runs, the sum over images and output positions of x^2 for each weight, in the weight's shape;
    and how many images were seen.
    """
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
    """What `measure` says of each layer that runs, summed over the data; and how many images were seen."""
    copy = measuring_copy(model)
    totals: dict[str, Tensor] = {}
    images = 0
    with _watching(copy, choices, measure, totals), torch.no_grad():
        for batch in iterate(data, progress, "activations"):
            output = run(copy, batch, forward)
            images += count_of(batch, output, forward)
    for name, value in totals.items():
        if not bool(value.isfinite().all()):
            raise DataError(f"layer {name} gets NaN or infinite inputs: check the images and their normalisation")
    return totals, images


def measuring_copy(model: nn.Module) -> nn.Module:
    """A copy to measure on: in evaluation mode, and in single precision where it was half."""
    copy = clone(model).eval()
    if next((p.dtype for p in copy.parameters()), None) in (torch.float16, torch.bfloat16):
        copy.float()  # sums of squares leave the range of half precision
    return copy


@contextmanager
def _watching(
    copy: nn.Module, choices: Sequence[Choice], measure: Measure, totals: dict[str, Tensor]
) -> Iterator[None]:
    def watch(name: str, module: nn.Module) -> Any:
        set_weight_(module, weight_of(module))  # plain, so that a gradient can be taken with respect to it

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen = measure(module, *args, **kwargs)
            totals[name] = totals[name] + seen if name in totals else seen

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    handles = [watch(c.name, copy.get_submodule(name)) for c in choices for name in (c.name, *c.shared_with)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def column_squares(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """For each weight of the layer the sum of squares of all that it is multiplied with.

    >>> column_squares(nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]])).tolist()
    [[10.0, 4.0]]
    """
    return column_sums(module, input.detach().square(), *args, **kwargs)


def column_sums(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """For each weight of the layer the sum of all that it is multiplied with.

    A layer is linear in its weight: the derivative of its summed output by a weight is that sum, whatever strides,
    padding, dilation and groups the layer's own forward has.

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
