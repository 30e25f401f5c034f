"""Packed checkpoints: kept values, each with its index within the block (2 bits for 2:4), as in the paper's figure 1.

In fp16 a 2:4 layer takes 36 instead of 64 bits per block, 56 % of its dense size. All other tensors are stored
unchanged. Unpacking returns the state dict of `apply(model, masks)` bit for bit, and the masks.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halve.errors import FileError, HalveError, ModelError, OptionError, listed
from halve.masks import storage
from halve.masks.apply import OnChanged, applied_in_checkpoint_order
from halve.masks.bits import pack_bits, unpack_bits
from halve.masks.file import header_of, masks_from, tensors_of
from halve.masks.layout import Layout
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import fits, moved
from halve.masks.pattern import Pattern
from halve.modules import weight_name

FORMAT = storage.Format("halve.packed", 1, "packed checkpoint", "'halve pack'")
SUFFIX = ".packed.safetensors"


class Unpacked(NamedTuple):
    """The content of a packed checkpoint: the masked model's state dict, and its masks."""

    state: dict[str, Tensor]
    masks: MaskSet


def pack(
    model: nn.Module,
    masks: MaskSet,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    on_changed: OnChanged = "warn",
) -> Path:
    """Write the masked model's checkpoint with kept values only, atomically, and return its path.

    Args:
        model: The dense model. It is not changed.
        masks: Its masks.
        path: File to write, customarily `NAME.packed.safetensors`.
        dtype: Cast floating-point tensors to this dtype first (default: keep theirs).
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".

    >>> import halve, tempfile
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    >>> masks = halve.prune(model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state, again = halve.unpack(halve.pack(model, masks, f"{folder}/tiny.packed.safetensors"))
    >>> torch.equal(state["0.weight"], halve.apply(model, masks)[0].weight), again == masks
    (True, True)
    """
    if dtype is not None and not dtype.is_floating_point:
        raise OptionError(f"dtype must be a floating-point type, such as torch.float16; got {dtype}")
    state = applied_in_checkpoint_order(model, masks, on_changed).state_dict(keep_vars=True)
    first = _first_names(state, masks)
    tensors, aliases = tensors_of(masks), {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"only tensors can be packed, but {name} in the state dict is a {type(value).__name__}")
        value = _cast(name, value.detach(), dtype)
        layer = _layer(name)
        if first[name] != name:
            aliases[name] = first[name]
        elif layer is not None and layer in masks:
            mask = masks[layer]
            kept = mask.pattern.decode(mask.stored_codes)
            shape = (*mask.stored_codes.shape, mask.pattern.kept)
            tensors[f"values:{layer}"] = mask.layout.to_blocks(value.cpu())[kept].reshape(shape)
            tensors[f"indices:{layer}"] = pack_bits(kept.nonzero()[:, -1], _index_bits(mask.pattern))
        else:
            tensors[f"tensor:{name}"] = value
    if lost := [name for name in masks if f"values:{name}" not in tensors]:
        raise ModelError(
            f"the state dict has no weight of {listed(lost)}, so it cannot be packed: "
            f"register it as a parameter or a buffer"
        )
    return storage.write(path, FORMAT, {**header_of(masks), "aliases": aliases}, tensors)


def _cast(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not value.is_floating_point():
        return value
    result = value.to(dtype)
    if bool(result.isinf().any()) and not bool(value.isinf().any()):
        raise ModelError(f"{name} has values up to {float(value.abs().max()):.3g}, which overflow {dtype}")
    return result


def _layer(name: str) -> str | None:
    """The layer whose weight a state-dict entry is, if it is one; '' if the model itself is a layer."""
    head, _, tail = name.rpartition(".")
    return head if tail == "weight" else None


def _first_names(state: dict[str, Tensor], masks: MaskSet) -> dict[str, str]:
    """For each name, the name its tensor is stored under. Tied tensors are stored once, under a masked layer's name."""
    seen: dict[int, str] = {}
    names = sorted(state, key=lambda name: _layer(name) not in masks)
    return {name: seen.setdefault(id(state[name]), name) for name in names}


def unpack(path: str | Path) -> Unpacked:
    """Read a packed checkpoint: the state dict of the masked model as `apply` returns it, and the masks.

    Args:
        path: A file that `pack` wrote. It holds the checkpoint's channel order; the state dict has channels moved so
            that every block is contiguous.

    >>> import halve, tempfile
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state, masks = halve.unpack(halve.pack(model, halve.prune(model), f"{folder}/tiny.packed.safetensors"))
    >>> sorted(state), masks.density
    (['0.bias', '0.weight', '1.bias', '1.weight'], 0.5)
    """
    path = Path(path)
    _, header, tensors = storage.read(path, [FORMAT])
    if header.keys() - {"moves"} != {"layers", "recipe", "aliases"}:
        raise FileError(
            f"{path} is damaged: its header must have the keys layers, recipe, aliases and optionally moves"
        )
    kept: dict[str, Tensor] = {}

    def codes(name: str, pattern: Pattern, layout: Layout) -> Tensor:
        kept[name] = _kept(tensors.pop(f"indices:{name}"), tensors[f"values:{name}"], pattern, layout)
        return pattern.encode(kept[name])

    masks = masks_from(path, header, tensors, codes)
    try:
        state = {
            weight_name(name): _weight(mask, kept[name], tensors.pop(f"values:{name}")) for name, mask in masks.items()
        }
        more = {key.removeprefix("tensor:"): tensors.pop(key) for key in list(tensors) if key.startswith("tensor:")}
        aliases = header["aliases"]
        if more.keys() & state.keys() or aliases.keys() & (more | state).keys():
            raise FileError("a tensor is stored twice")
        state |= more
        state |= {name: state[other] for name, other in aliases.items()}
    except (HalveError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if tensors:
        raise FileError(f"{path} is damaged: it has tensors that belong to nothing: {listed(sorted(tensors))}")
    moves = masks.moves
    if wrong := [name for name, dims in moves.items() if name not in state or not fits(state[name], dims)]:
        raise FileError(f"{path} is damaged: its channel orders do not fit {listed(wrong)}")
    return Unpacked({name: moved(value, moves.get(name, {})) for name, value in state.items()}, masks)


def _index_bits(pattern: Pattern) -> int:
    return max(1, (pattern.size - 1).bit_length())


def _kept(stream: Tensor, values: Tensor, pattern: Pattern, layout: Layout) -> Tensor:
    shape = (layout.rows, layout.blocks, pattern.kept)
    if tuple(values.shape) != shape:
        raise FileError(f"expected values of shape {shape}, got {tuple(values.shape)}")
    index = unpack_bits(stream, values.numel(), _index_bits(pattern)).reshape(shape)
    if bool((index >= pattern.size).any()) or bool((index.diff(dim=-1) <= 0).any()):
        raise FileError(f"the indices of a block must ascend within 0..{pattern.size - 1}")
    return torch.zeros(*shape[:2], pattern.size, dtype=torch.bool).scatter_(2, index, True)


def _weight(mask: Mask, kept: Tensor, values: Tensor) -> Tensor:
    blocks = torch.zeros(kept.shape, dtype=values.dtype)
    blocks[kept] = values.reshape(-1)
    return mask.layout.from_blocks(blocks).contiguous()
