"""Scale and shift of normalisation layers, learned relative to the checkpoint's."""

import torch
from torch import Tensor, nn

from halve.masks.corrections import NORMS, Corrections, corrected

RATE = 0.02  # what the learning rate of the logits is multiplied by, for changes relative to a norm's scale


class Norms:
    """The scales and shifts of a model's norms.

    Both are learned in units of the scale, which is the deviation of a norm's output: one rate then suits all channels.

    Args:
        model: The frozen model.
        start: Corrections to start from. They stay in place if nothing is learned.
        learned: Whether scales and shifts are learned.

    >>> norms = Norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {}, learned=True)
    >>> norms.size
    4
    >>> list(norms.tensors(torch.zeros(4))), norms.corrections(torch.zeros(4))
    (['1.weight', '1.bias'], {})
    """

    def __init__(self, model: nn.Module, start: Corrections, *, learned: bool) -> None:
        found = _units(model) if learned else {}
        held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        names = [*found, *(name for name in start if name not in found)]
        self._dense = {name: held[name].detach().float() for name in names}
        self._start = _flat([_started(self._dense[name], start.get(name)) for name in names])
        self._units = _flat(list(found.values()))
        self.size = self._units.numel()

    def tensors(self, learned: Tensor) -> dict[str, Tensor]:
        """The corrected scales and shifts by state-dict name, differentiable with respect to the learned numbers."""
        if not self._dense:
            return {}
        flat = self._start
        if self.size:
            flat = torch.cat([flat[: self.size] + RATE * self._units * learned, flat[self.size :]])
        parts = flat.split([tensor.numel() for tensor in self._dense.values()])
        return {name: part.view_as(self._dense[name]) for name, part in zip(self._dense, parts, strict=True)}

    @torch.no_grad()
    def corrections(self, learned: Tensor) -> dict[str, Tensor]:
        """What is stored with the masks: before and after, for each tensor that changed."""
        after = self.tensors(learned)
        changed = [name for name, before in self._dense.items() if not torch.equal(before, after[name])]
        return {name: torch.stack([self._dense[name], after[name]]).cpu() for name in changed}


def _units(model: nn.Module) -> dict[str, Tensor]:
    """By state-dict name, what a scale or a shift that is learned is measured in: the scale."""
    units: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        scale = module._parameters.get("weight") if isinstance(module, NORMS) else None
        if scale is None:
            continue
        for key in ("weight", "bias"):
            if module._parameters.get(key) is not None:
                units[f"{name}.{key}".lstrip(".")] = scale.detach().float()
    return units


def _started(dense: Tensor, start: Tensor | None) -> Tensor:
    return dense if start is None else corrected(dense, start)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else torch.empty(0)
