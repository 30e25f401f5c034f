"""Choose masks layer by layer, in the order in which the network runs, so that each sees the masks before it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halve.batches import Forward, as_batches, images_of, result_of
from halve.modules import plain_weight_, set_weight_, weight_of
from halve.prune.statistics import Spread, column_means, hooked, is_empty, layers_of, measuring_copy, spread
from halve.select.select import Choice

SAMPLE = 64  # images to run on; 1,024 gave no better masks for ResNet-20


class Drift(NamedTuple):
    """How the masks of earlier layers change what a layer that is still dense gets and returns."""

    inputs: Tensor  # mean input of each column of a row, (groups, columns)
    missing: Tensor  # dense mean of each output channel minus the current one, (rows)
    strength: Tensor  # variance of each output channel relative to the dense one, (rows)


Pick = Callable[[Choice, Drift], Tensor]  # returns what a layer keeps: bool, of the weight's shape


def sample_of(data: Any, forward: Forward | None = None) -> Any:
    """One batch of `SAMPLE` images, joined from the first batches; of lists and with `forward`, the first batch."""
    parts: list[Tensor] = []
    for batch in as_batches(data):
        if forward is not None:
            return batch  # only the user knows how to join two batches
        images = images_of(batch)
        if not isinstance(images, Tensor):
            return images  # each may be large
        if not parts or images.shape[1:] == parts[0].shape[1:]:
            parts.append(images[: SAMPLE - sum(map(len, parts))])
        if sum(map(len, parts)) == SAMPLE:
            break
    return torch.cat(parts)


@torch.inference_mode(False)
def pick_sequentially(
    model: nn.Module,
    choices: Sequence[Choice],
    known: Mapping[str, Tensor],
    pick: Pick,
    batch: Any,
    forward: Forward | None = None,
) -> None:
    """Call `pick` for each layer when it first runs on the batch, with all earlier layers masked.

    Args:
        model: The dense model. It is not changed.
        choices: The masked layers.
        known: What layers keep whose masks are already chosen, bool of the weight's shape.
        pick: Called with a choice and its drift; returns what the layer keeps.
        batch: What to run the model on.
        forward: How to run the model on a batch, if unusual.
    """
    copy = measuring_copy(model)
    for choice in choices:
        for layer in layers_of(copy, choice):
            plain_weight_(layer)  # so that it can be masked
    undecided = [choice for choice in choices if choice.name not in known]
    dense: dict[str, Spread] = {}
    picked: set[str] = set()

    def record(choice: Choice, layer: nn.Module) -> Any:
        def hook(module: nn.Module, _: Any, output: Tensor) -> None:
            if output.numel():
                dense.setdefault(choice.name, spread(module, output))

        return layer.register_forward_hook(hook)

    def decide(choice: Choice, layer: nn.Module) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if choice.name in picked or choice.name not in dense or is_empty(*args, **kwargs):
                return
            picked.add(choice.name)
            input: Tensor = args[0] if args else kwargs["input"]
            output = module.forward(*args, **kwargs)
            before, now = dense[choice.name], spread(module, output)
            means = column_means(module, input, output)
            drift = Drift(means, before.mean - now.mean, _ratio(now.variance, before.variance))
            _keep_(copy, choice, pick(choice, drift))

        return layer.register_forward_pre_hook(hook, with_kwargs=True)

    with torch.no_grad():
        with hooked(copy, undecided, record):
            result_of(copy, batch, forward)
        for choice in choices:
            if choice.name in known:
                _keep_(copy, choice, known[choice.name])
        with hooked(copy, undecided, decide):
            result_of(copy, batch, forward)


def _keep_(copy: nn.Module, choice: Choice, kept: Tensor) -> None:
    for layer in layers_of(copy, choice):
        weight = weight_of(layer)
        set_weight_(layer, weight * kept.to(weight.device))


def _ratio(now: Tensor, before: Tensor) -> Tensor:
    """Ratio of two variances, limited: a nearly constant channel must not demand the impossible."""
    return torch.where(before > 0, now / before.clamp(min=1e-30), 1.0).clamp(max=4.0)
