"""Load and save state dicts. Loading never runs code."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from halve.errors import FileError, ModelError, first_line, listed
from halve.masks import packed, storage
from halve.masks.storage import write_atomically

_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_state", "weights", "net")
_ADDED = ("module", "_orig_mod")  # by DataParallel and DDP, and by torch.compile, to names


def load_state(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file, a packed checkpoint or a PyTorch file."""
    path = Path(path)
    kind = storage.format_of(path)
    if kind == packed.FORMAT.name:
        return packed.unpack(path).state
    try:
        if kind is not None or path.suffix == ".safetensors":
            state: Any = safetensors.torch.load(storage.read_bytes(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} is damaged, or contains more than tensors, so that loading it could run code; "
            f"save model.state_dict() instead"
        ) from error
    except Exception as error:  # torch may raise anything on a damaged file
        raise FileError(f"{path} is not a readable checkpoint: {first_line(error)}") from error
    for key in _WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise FileError(f"{path} has no state dict: expected tensors by name, or under one of {listed(_WRAPPERS)}")
    return {str(name): value for name, value in state.items()}


def _without_wrappers(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict without what DataParallel, DDP and torch.compile add to names, unless the model has it too."""
    names = {name: _without_wrapper(name, own) for name in state}
    if len(set(names.values())) < len(names):
        return state
    return {names[name]: value for name, value in state.items()}


def _without_wrapper(name: str, own: Mapping[str, Tensor]) -> str:
    parts = name.split(".")
    while ".".join(parts) not in own and (wrapper := next((part for part in parts if part in _ADDED), None)):
        parts.remove(wrapper)
    return ".".join(parts)


def load_weights_(model: nn.Module, path: str | Path) -> None:
    """Load a checkpoint into a model. Raises unless names and shapes match."""
    own = model.state_dict()
    state = _without_wrappers(load_state(path), own)
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    strange = [name for name in state if name not in own]
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    problems = [
        f"{what} {listed(names, most=4)}"
        for what, names in (("missing", missing), ("unexpected", strange), ("wrong shape", shapes))
        if names
    ]
    if problems:
        raise ModelError(f"{path} is not a checkpoint of this {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(state, strict=False)


def save_state(state: Mapping[str, Tensor], path: str | Path, made_by: str | None = None) -> Path:
    """Write a state dict as safetensors, atomically. Tied tensors are written once per name.

    Args:
        state: The tensors by name.
        path: The file.
        made_by: The command that made it, such as "halve apply", which may replace it later on (default: none).
    """
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    about = {"format": "pt"} | ({"made_by": made_by} if made_by else {})
    return write_atomically(path, safetensors.torch.save(plain, about))


def made_by(path: str | Path) -> str | None:
    """The command that made a checkpoint, if one of halve's did."""
    metadata = storage.metadata_of(path)
    return None if metadata is None or metadata.get("format") != "pt" else metadata.get("made_by")
