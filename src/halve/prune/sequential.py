"""Choose masks layer by layer while the network runs, each for what the masked layers before it give."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halve.batches import Forward, as_batches, images_of, run
from halve.modules import set_weight_, weight_of
from halve.prune.moments import Spread, column_means, spread
from halve.prune.statistics import measuring_copy
from halve.select.select import Choice

SAMPLE = 64  # images that run through the network: with 1,024 instead, ResNet-20's masks are no better


class Drift(NamedTuple):
    """How a layer, not masked yet, differs from the dense network because of the masked layers before it."""

    inputs: Tensor  # the mean of what each column of a row is multiplied with, (groups, columns)
    missing: Tensor  # what the mean of each output channel lacks, (rows)
    strength: Tensor  # the variance of each output channel over the dense one, (rows)


Pick = Callable[[Choice, Drift], Tensor]  # what a layer keeps: bool, of the weight's shape


def sample_of(data: Any, forward: Forward | None = None) -> Any:
    """One batch of `SAMPLE` images, from as many of the first batches as that takes.

    With a `forward` of the user's own it is the first batch as it is: nobody else knows how to join two.
    """
    parts: list[Tensor] = []
    for batch in as_batches(data):
        if forward is not None:
            return batch
        images = images_of(batch)
        if not parts or images.shape[1:] == parts[0].shape[1:]:
            parts.append(images[: SAMPLE - sum(map(len, parts))])
        if sum(map(len, parts)) == SAMPLE:
            break
    return torch.cat(parts)


@torch.inference_mode(False)
def cascade(
    model: nn.Module,
    choices: Sequence[Choice],
    known: Mapping[str, Tensor],
    pick: Pick,
    batch: Any,
    forward: Forward | None = None,
) -> None:
    """Call `pick` for each of the choices that runs on the batch, when it first runs.

    For layers whose masks are known before, `known` says what they keep, of the weight's shape.
    """
    copy = measuring_copy(model)
    for choice in choices:
        for layer in _layers(copy, choice):
            set_weight_(layer, weight_of(layer))  # plain, so that it can be masked
    undecided = [choice for choice in choices if choice.name not in known]
    dense: dict[str, Spread] = {}
    met: set[str] = set()

    def note(choice: Choice, module: nn.Module, output: Tensor) -> None:
        if choice.name not in dense:
            dense[choice.name] = spread(module, output)

    def turn(choice: Choice, module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> None:
        if choice.name in met or choice.name not in dense:
            return
        met.add(choice.name)
        output = module.forward(input, *args, **kwargs)
        then, now = dense[choice.name], spread(module, output)
        drift = Drift(column_means(module, input, output), then.mean - now.mean, _ratio(now.variance, then.variance))
        _keep_(copy, choice, pick(choice, drift))

    with torch.no_grad():
        with _hooked(copy, undecided, lambda c, layer: layer.register_forward_hook(lambda m, _, y: note(c, m, y))):
            run(copy, batch, forward)
        for choice in choices:
            if choice.name in known:
                _keep_(copy, choice, known[choice.name])
        with _hooked(
            copy,
            undecided,
            lambda c, layer: layer.register_forward_pre_hook(lambda m, a, k: turn(c, m, *a, **k), with_kwargs=True),
        ):
            run(copy, batch, forward)


@contextmanager
def _hooked(copy: nn.Module, choices: Sequence[Choice], hook: Callable[[Choice, nn.Module], Any]) -> Iterator[None]:
    handles = [hook(choice, layer) for choice in choices for layer in _layers(copy, choice)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(copy: nn.Module, choice: Choice) -> list[nn.Module]:
    return [copy.get_submodule(name) for name in (choice.name, *choice.shared_with)]


def _keep_(copy: nn.Module, choice: Choice, kept: Tensor) -> None:
    for layer in _layers(copy, choice):
        weight = weight_of(layer)
        set_weight_(layer, weight * kept.to(weight.device))


def _ratio(now: Tensor, then: Tensor) -> Tensor:
    """Of two variances; a channel that hardly moves in the dense network must not ask for the impossible."""
    return torch.where(then > 0, now / then.clamp(min=1e-30), 1.0).clamp(max=4.0)
