"""Compare detectors by what their heads return, in the same regions of the images.

The boxes that a detector returns cannot be compared by a difference: a changed network may find more or fewer, in
another order, and so may rounding errors. Class scores and box offsets of its heads can, as long as both networks look
at the same regions. The changed network therefore gets the regions that the original one proposed.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import is_detections
from halve.errors import ModelError
from halve.modules import kind_of
from halve.select.head import find_heads

_PROPOSING = "RegionProposalNetwork"  # torchvision's: returns boxes
_RESIZING = "GeneralizedRCNNTransform"  # torchvision's: takes images in 0..1, and normalises and stacks them
_POOLING = "MultiScaleRoIAlign"  # torchvision's: forward(features, boxes, image sizes)

Run = Callable[[], Any]  # runs the model


@dataclass
class HeadOutputs:
    """What the heads returned in one run, and the regions that were looked at, both in the order of calls."""

    calls: list[tuple[str, Tensor]] = field(default_factory=list)
    regions: list[Any] = field(default_factory=list)

    @property
    def heads(self) -> set[str]:
        return {name for name, _ in self.calls}

    def relative_to(self, original: "HeadOutputs") -> Tensor:
        """All outputs as one tensor of shape (1, values, 1), each divided by the norm of the original's head.

        All heads then count the same.
        """
        squares: dict[str, Tensor] = {}
        for name, output in original.calls:
            squares[name] = squares.get(name, torch.zeros((), device=output.device)) + _wide(output).square().sum()
        outputs = [_wide(output).flatten() / squares[name].sqrt().clamp(min=1e-12) for name, output in self.calls]
        return torch.cat(outputs).reshape(1, -1, 1)


def takes_lists(model: nn.Module) -> bool:
    """Whether a model is one of torchvision's detectors, or made of one: they take lists of images of any sizes."""
    return any(type(module).__name__ == _RESIZING for module in model.modules())


def first_run(model: nn.Module, run: Run) -> tuple[Any, HeadOutputs | None]:
    """The result of a run and, if the model turns out to be a detector, what its heads returned."""
    seen = HeadOutputs()
    result = _run(model, run, [name for name, module in model.named_modules() if kind_of(module)], seen)
    if not is_detections(result):
        return result, None
    heads = find_heads(model)
    seen.calls = [(name, output) for name, output in seen.calls if name in heads]
    if not seen.calls:
        raise ModelError(
            f"{type(model).__name__} returns boxes, but no layers were found that they come from; "
            f"pass forward= to return a tensor that can be compared"
        )
    return result, seen


def head_outputs(model: nn.Module, run: Run, heads: Collection[str]) -> HeadOutputs:
    """What the heads of a detector return."""
    seen = HeadOutputs()
    _run(model, run, heads, seen)
    return seen


def head_outputs_in(original: HeadOutputs, model: nn.Module, run: Run) -> HeadOutputs:
    """What the heads of a changed detector return in the regions that the original one looked at."""
    seen = HeadOutputs()
    try:
        _run(model, run, original.heads, seen, original)
    except _LastCall:
        return seen
    raise ModelError(
        f"the heads of {type(model).__name__} ran {len(seen.calls)} times instead of {len(original.calls)}: "
        f"pass forward= to return a tensor that can be compared"
    )


class _LastCall(Exception):
    """Ends a run: boxes are chosen after the last head, from other regions than those of the changed detector."""


def _run(
    model: nn.Module,
    run: Run,
    watched: Collection[str],
    seen: HeadOutputs,
    original: HeadOutputs | None = None,
) -> Any:
    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen.calls.append((name, output))
            if original is not None and len(seen.calls) == len(original.calls):
                raise _LastCall

        return hook

    def regions(own: Any) -> Any:
        seen.regions.append(own)
        return own if original is None else original.regions[len(seen.regions) - 1]

    def propose(module: nn.Module, args: Any, output: Any) -> Any:
        return regions(output)

    def pool(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        features, boxes, *rest = (*args, *kwargs.values())
        return (features, regions(boxes), *rest), {}

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in watched]
    for module in model.modules():
        if type(module).__name__ == _PROPOSING:
            handles.append(module.register_forward_hook(propose))
        if type(module).__name__ == _POOLING:
            handles.append(module.register_forward_pre_hook(pool, with_kwargs=True))
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
