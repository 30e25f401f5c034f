"""Packed checkpoints: kept values, each with its index within the block (2 bits for 2:4), as in the paper's figure 1.

In fp16 a 2:4 layer takes 36 instead of 64 bits per block, 56 % of its dense size. All other tensors are stored
unchanged. Unpacking returns the state dict of `apply(model, masks)` bit for bit, and the masks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halve.errors import DtypeWarning, FileError, HalveError, MaskError, ModelError, OptionError, listed, warn
from halve.masks import storage
from halve.masks.apply import OnChanged, applied_in_checkpoint_order
from halve.masks.bits import pack_bits, unpacked_chunks
from halve.masks.file import OPTIONAL_KEYS, header_of, masks_from, tensors_of
from halve.masks.layout import Layout
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import fits, moved
from halve.masks.pattern import Pattern
from halve.modules import weight_name

FORMAT = storage.Format("halve.packed", 1, "packed checkpoint", "'halve pack'")
SUFFIX = ".packed.safetensors"
_MAX_GROWTH = 48  # dense bytes per stored byte: enough for 1:64 in 16 bits
_FREE_GROWTH = 1 << 25


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
    force: bool = False,
) -> Path:
    """Write the masked model's checkpoint with kept values only, atomically, and return its path.

    Args:
        model: The dense model. It is not changed.
        masks: Its masks.
        path: File to write, customarily `NAME.packed.safetensors`.
        dtype: Cast floating-point tensors to this dtype first (default: keep theirs). Buffers with values beyond its
            range, such as a BatchNorm variance above 65,504 in float16, keep their dtype, with a warning. Weights and
            biases beyond its range are an error.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".
        force: Replace an existing file, whatever it is. Default: False, which replaces an older packed checkpoint only.

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
    tensors, aliases, uncast = tensors_of(masks), {}, []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"only tensors can be packed, but {name} in the state dict is a {type(value).__name__}")
        value = _cast(name, value, dtype)
        if value.is_floating_point() and dtype not in (None, value.dtype):
            uncast.append(name)
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
    if uncast:
        warn(f"{listed(uncast)}: values overflow {dtype}, so the file has {state[uncast[0]].dtype}", DtypeWarning)
    dense = sum(masks[name].layout.weights * tensors[f"values:{name}"].itemsize for name in masks)
    _check_growth(dense, sum(tensor.nbytes for tensor in tensors.values()))
    return storage.write(path, FORMAT, {**header_of(masks), "aliases": aliases}, tensors, force=force)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in another dtype; a buffer that overflows it is returned unchanged."""
    value = tensor.detach()
    if dtype is None or not value.is_floating_point():
        return value
    result = value.to(dtype)
    if not bool((result.isinf() & value.isfinite()).any()):
        return result
    if isinstance(tensor, nn.Parameter):
        raise ModelError(
            f"{name} has values up to {float(value.abs().max()):.3g}, which overflow {dtype}; "
            f"use dtype=torch.bfloat16, or leave dtype out"
        )
    return value


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
    if header.keys() - OPTIONAL_KEYS != {"layers", "recipe", "aliases"}:
        raise FileError(
            f"{path} is damaged: its header must have the keys layers, recipe, aliases and optionally digests and moves"
        )
    stored = sum(tensor.nbytes for tensor in tensors.values())
    dense = 0

    def codes(name: str, pattern: Pattern, layout: Layout) -> Tensor:
        nonlocal dense
        values = tensors[f"values:{name}"]
        if tuple(values.shape) != (layout.rows, layout.blocks, pattern.kept):
            expected = (layout.rows, layout.blocks, pattern.kept)
            raise FileError(f"expected values of shape {expected}, got {tuple(values.shape)}")
        dense += layout.weights * values.itemsize
        _check_growth(dense, stored)
        return _codes(tensors[f"indices:{name}"], pattern, layout)

    masks = masks_from(path, header, tensors, codes)
    try:
        state = {
            weight_name(name): _weight(mask, tensors.pop(f"indices:{name}"), tensors.pop(f"values:{name}"))
            for name, mask in masks.items()
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


def _check_growth(dense: int, stored: int) -> None:
    """Raise if the dense weights are so much larger than the file that it may have been crafted to fill the memory."""
    if dense > _MAX_GROWTH * stored + _FREE_GROWTH:
        raise MaskError(
            f"the dense weights would take {dense:,} bytes, more than {_MAX_GROWTH} times the {stored:,} bytes stored; "
            f"keep the dense checkpoint and a mask file instead of a packed checkpoint"
        )


def _codes(stream: Tensor, pattern: Pattern, layout: Layout) -> Tensor:
    """The codes of packed indices, one chunk of blocks at a time."""
    blocks = layout.rows * layout.blocks
    codes = torch.empty(blocks, dtype=pattern.dtype)
    for start, index in _indices(stream, blocks, pattern):
        if bool((index >= pattern.size).any()) or bool((index.diff(dim=-1) <= 0).any()):
            raise FileError(f"the indices of a block must ascend within 0..{pattern.size - 1}")
        codes[start : start + len(index)] = pattern.rank(index.long())
    return codes.reshape(layout.rows, layout.blocks)


def _weight(mask: Mask, stream: Tensor, values: Tensor) -> Tensor:
    """The dense weight, filled one chunk of blocks at a time."""
    layout, pattern = mask.layout, mask.pattern
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    weight = torch.zeros(layout.shape, dtype=values.dtype)
    flat, stored = weight.reshape(-1).view(same_width), values.reshape(-1).view(same_width)
    order = None if layout.channel_order is None else torch.tensor(layout.channel_order, dtype=torch.int32)
    for start, index in _indices(stream, layout.rows * layout.blocks, pattern):
        block = torch.arange(start, start + len(index)).unsqueeze(1)
        where = layout.flat_index(block // layout.blocks, block % layout.blocks, index, order).reshape(-1)
        part = stored[start * pattern.kept :][: where.numel()]
        real = where >= 0
        flat[where[real]] = part[real]
    return weight


def _indices(stream: Tensor, blocks: int, pattern: Pattern) -> Iterator[tuple[int, Tensor]]:
    """The places of the kept weights, (blocks, N) for each chunk, with the number of its first block."""
    start = 0
    for chunk in unpacked_chunks(stream, blocks * pattern.kept, _index_bits(pattern), pattern.kept):
        yield start, chunk.reshape(-1, pattern.kept)
        start += len(chunk) // pattern.kept
