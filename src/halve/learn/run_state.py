"""The state of a learning run in a file: killed at any time, a run loses at most what came after the last one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halve.errors import FileError, MaskError, listed
from halve.masks import storage

FORMAT = storage.Format("halve.learning", 1, "run state", "'halve learn'")
SUFFIX = ".learning.safetensors"
_TENSORS = ("logits", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands. `identity` says which run it is: settings, layers, weights."""

    identity: dict[str, Any]
    step: int
    batches: int
    seconds: float
    logits: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    permutation: dict[str, Any] | None = None  # channel orders, which a search within a time limit may not find again;
    # or why there are none; None where nobody looked for any

    def save(self, path: str | Path) -> Path:
        """Write it, atomically."""
        names = ("identity", "step", "batches", "seconds", "permutation")
        header = {name: getattr(self, name) for name in names}
        return storage.write(path, FORMAT, header, {name: getattr(self, name) for name in _TENSORS})

    @staticmethod
    def refuse_to_overwrite(path: str | Path) -> None:
        """Raise where the file of a new run is there already."""
        if Path(path).exists():
            raise FileError(
                f"{path} holds the state of a run: resume=True goes on from it; delete it to start anew, "
                f"or name another checkpoint"
            )

    @staticmethod
    def permutation_in(path: str | Path) -> dict[str, Any] | None:
        """What became of channel orders in the run that a checkpoint belongs to; None where nobody looked for any."""
        _, header, _ = storage.read(path, [FORMAT])
        found = header.get("permutation")
        return found if isinstance(found, dict) else None

    @classmethod
    def load(cls, path: str | Path, identity: Mapping[str, Any], logits: Tensor) -> "Checkpoint":
        """Read it; raises where it belongs to another run."""
        _, header, tensors = storage.read(path, [FORMAT])
        theirs = header.get("identity")
        if not isinstance(theirs, dict):
            raise FileError(f"{path} is damaged: it does not say which run it belongs to")
        there, here = _flat(theirs), _flat(identity)
        if different := [key for key in here | there if here.get(key) != there.get(key)]:
            shown = [f"{key} ({_brief(there.get(key))} there, {_brief(here.get(key))} here)" for key in different]
            raise MaskError(
                f"{path} is a checkpoint of another run: {listed(shown, 4)} differ; "
                f"resume with the same settings, or start anew with another checkpoint file"
            )
        numbers = [header.get(key) for key in ("step", "batches", "seconds")]
        shapes = {tuple(tensors[name].shape) if name in tensors else None for name in _TENSORS}
        if shapes != {tuple(logits.shape)} or not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            raise FileError(f"{path} is damaged: it does not hold the state of {logits.numel():,} logits")
        step, batches, seconds = numbers
        return cls(
            dict(identity),
            int(step or 0),
            int(batches or 0),
            float(seconds or 0),
            tensors["logits"],
            tensors["exp_avg"],
            tensors["exp_avg_sq"],
            header.get("permutation"),
        )


def optimizer_state(optimizer: torch.optim.Optimizer, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's two averages; zeros before the first step."""
    state = optimizer.state.get(logits, {})
    return tuple(state.get(key, torch.zeros_like(logits)) for key in ("exp_avg", "exp_avg_sq"))


def restore_(optimizer: torch.optim.Optimizer, logits: Tensor, checkpoint: Checkpoint) -> None:
    """Put logits and averages back."""
    with torch.no_grad():
        logits.copy_(checkpoint.logits)
    if checkpoint.step:
        optimizer.state[logits] = {
            "step": torch.tensor(float(checkpoint.step), device=logits.device if logits.is_cuda else None),
            "exp_avg": checkpoint.exp_avg.to(logits),
            "exp_avg_sq": checkpoint.exp_avg_sq.to(logits),
        }


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """One level deep, so that a message can name the setting or the layer."""
    flat: dict[str, Any] = {}
    for key, value in identity.items():
        flat |= {f"{key}.{inner}": part for inner, part in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
