"""State dicts from and to files; loading never runs code."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from halve.errors import FileError, ModelError, listed
from halve.masks import packed, storage
from halve.masks.storage import write_atomically

_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_state", "weights", "net")


def load_state(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file (packed ones too) or a PyTorch file."""
    path = Path(path)
    kind = storage.format_of(path)
    if kind == packed.FORMAT:
        return packed.unpack(path).state
    try:
        if kind is not None or path.suffix == ".safetensors":
            state: Any = safetensors.torch.load(storage.read_bytes(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} holds more than tensors, or is damaged, and loading it could run code; "
            f"save model.state_dict() instead"
        ) from error
    except Exception as error:  # a damaged file makes torch raise whatever its bytes happen to mean
        raise FileError(f"{path} is no readable checkpoint: {type(error).__name__}: {error}") from error
    for key in _WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise FileError(f"{path} holds no state dict: tensors by name, possibly under one of {listed(_WRAPPERS)}")
    return {str(name): value for name, value in state.items()}


def _without_wrappers(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without what DDP and torch.compile put before them, where the model's own names do not have it."""
    while not own.keys() & state.keys():
        prefix = next((p for p in ("module.", "_orig_mod.") if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def load_weights_(model: nn.Module, path: str | Path) -> None:
    """Load a checkpoint into the model; every tensor must fit."""
    own = model.state_dict()
    state = _without_wrappers(load_state(path), own)
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    strange = [name for name in state if name not in own]
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    problems = [
        f"{what} {listed(names, most=4)}"
        for what, names in (("it lacks", missing), ("it also has", strange), ("it has", shapes))
        if names
    ]
    if problems:
        raise ModelError(f"{path} is no checkpoint of this {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(state, strict=False)


def save_state(state: Mapping[str, Tensor], path: str | Path) -> Path:
    """Write a state dict as safetensors, atomically; tied tensors are written under each of their names."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    return write_atomically(path, safetensors.torch.save(plain, {"format": "pt"}))
