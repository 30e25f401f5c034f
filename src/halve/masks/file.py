"""Mask files: a MaskSet in `NAME.masks.safetensors`, beside the unchanged checkpoint.

A 2:4 mask takes about three quarters of a bit per weight. docs/reference/file-formats.md specifies the bytes. In short:
the header holds each layer's pattern, layout and digests; the tensor `codes:LAYER` holds its codes at `Pattern.bits`
bits each, `sketch:LAYER` the sketches of its fingerprint, and `channel_order:LAYER` its channel order, if any.
`statistics:BUFFER` are recalibrated BatchNorm buffers, `correction:TENSOR` are norms before and after their correction,
and `order:K` are the orders that the header's `moves` refer to. `digests` holds the digests of all tensors of the
model, which the header's `digests` names.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halve.errors import FileError, HalveError, listed
from halve.masks import storage
from halve.masks.bits import pack_bits, unpack_bits
from halve.masks.digests import Digests, dtypes_of
from halve.masks.fingerprint import SKETCH, Fingerprint
from halve.masks.layout import Layout
from halve.masks.mask import Mask, MaskSet
from halve.masks.moves import Moves
from halve.masks.pattern import Pattern
from halve.modules import weight_name

FORMAT = storage.Format("halve.masks", 1, "mask file", "'halve learn' or 'halve prune'")
SUFFIX = ".masks.safetensors"
MAX_RECIPE = 1 << 20
_MAX_WEIGHTS = 1 << 40
_DIGEST = 32  # bytes
_TEXTS = {"pattern", "kind", "order"}
OPTIONAL_KEYS = {"moves", "digests"}
_KEYS = _TEXTS | {"shape", "groups", "pad", "shared_with", "dense", "masked"}


def save(masks: MaskSet, path: str | Path, *, force: bool = False) -> Path:
    """Write a mask file atomically; see `MaskSet.save`."""
    return storage.write(path, FORMAT, header_of(masks), _stored(masks), force=force)


def checksum(masks: MaskSet) -> str:
    """The sha256 that the masks have in the metadata of their file."""
    return storage.checksum(FORMAT, header_of(masks), _stored(masks))


def _stored(masks: MaskSet) -> dict[str, Tensor]:
    codes = {f"codes:{name}": pack_bits(mask.stored_codes, mask.pattern.bits) for name, mask in masks.items()}
    return codes | tensors_of(masks)


def load(path: str | Path) -> MaskSet:
    """Read a mask file that `MaskSet.save` wrote.

    Loading never runs code. Raises `FileError` for a file that is damaged, or is not a mask file.

    Args:
        path: The file.

    >>> import halve, pathlib, tempfile
    >>> masks = halve.prune(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = masks.save(pathlib.Path(folder) / "tiny.masks.safetensors")
    ...     halve.load(path) == masks
    True
    """
    _, header, tensors = storage.read(path, [FORMAT])
    if header.keys() - OPTIONAL_KEYS != {"layers", "recipe"}:
        raise FileError(
            f"{path} is damaged: its header must have the keys layers, recipe and optionally digests and moves"
        )

    def codes(name: str, pattern: Pattern, layout: Layout) -> Tensor:
        count = layout.rows * layout.blocks
        stream = tensors.pop(f"codes:{name}")
        return unpack_bits(stream, count, pattern.bits, pattern.dtype).reshape(layout.rows, layout.blocks)

    masks = masks_from(Path(path), header, tensors, codes)
    if tensors:
        raise FileError(f"{path} is damaged: it has tensors that belong to no layer: {listed(sorted(tensors))}")
    return masks


def header_of(masks: MaskSet) -> dict[str, Any]:
    """The header entries of a MaskSet. Raises `FileError` if its recipe cannot be stored."""
    try:
        storage.check_json(masks.recipe)
        _check_recipe(masks.recipe)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"the recipe cannot be stored: {error}") from error
    header: dict[str, Any] = {
        "layers": {name: _describe(mask) for name, mask in masks.items()},
        "recipe": masks.recipe,
    }
    if (digests := masks.digests) is not None:
        tensors = {name: _dtype_name(next(iter(known))) for name, known in digests.dense.items()}
        header["digests"] = {"tensors": tensors, "tied": dict(digests.tied)}
    number = _numbers(masks.moves)
    moves = {
        name: {str(dim): number[order] for dim, order in dims.items()} for name, dims in masks.moves.items() if dims
    }
    return header | {"moves": moves} if moves else header


def tensors_of(masks: MaskSet) -> dict[str, Tensor]:
    """The tensors of a MaskSet other than its codes."""
    tensors = {f"statistics:{name}": value for name, value in masks.statistics.items()}
    tensors |= {f"correction:{name}": value for name, value in masks.corrections.items()}
    for name, mask in masks.items():
        if mask.fingerprint is not None:
            both = (mask.fingerprint.sketch, mask.fingerprint.masked_sketch)
            tensors[f"sketch:{name}"] = torch.tensor(both, dtype=torch.float32)
        if mask.layout.channel_order is not None:
            tensors[f"channel_order:{name}"] = torch.tensor(mask.layout.channel_order, dtype=torch.int32)
    for order, number in _numbers(masks.moves).items():
        tensors[f"order:{number}"] = torch.tensor(order, dtype=torch.int32)
    if (digests := masks.digests) is not None:
        masked = (digests.masked[name] for name in masks)  # in the order of the header's layers
        rows = [bytes.fromhex(digest) for known in (*digests.dense.values(), *masked) for digest in known.values()]
        flat = torch.tensor(list(b"".join(rows)), dtype=torch.uint8)
        tensors["digests"] = flat.reshape(-1, _DIGEST)
    return tensors


def _check_recipe(recipe: Mapping[str, Any]) -> None:
    if (size := len(json.dumps(recipe))) > MAX_RECIPE:
        raise FileError(f"a recipe may take {MAX_RECIPE:,} bytes as JSON, got {size:,}")


def _numbers(moves: Moves) -> dict[tuple[int, ...], int]:
    """A number for each distinct order: many tensors share one."""
    numbers: dict[tuple[int, ...], int] = {}
    for dims in moves.values():
        for order in dims.values():
            numbers.setdefault(order, len(numbers))
    return numbers


def masks_from(path: Path, header: Mapping[str, Any], tensors: dict[str, Tensor], codes_of: Any) -> MaskSet:
    """Rebuild a MaskSet, removing its tensors from `tensors`; `codes_of(name, pattern, layout)` returns codes."""
    layers, recipe = header.get("layers"), header.get("recipe")
    if not isinstance(layers, dict) or not isinstance(recipe, dict):
        raise FileError(f"{path} is damaged: layers and recipe must be JSON objects")
    try:
        _check_recipe(recipe)
    except FileError as error:
        raise FileError(f"{path} is damaged: {error}") from error
    masks = {}
    for name, entry in layers.items():
        try:
            masks[name] = _rebuild(name, entry, tensors, codes_of)
        except (HalveError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise FileError(f"{path} is damaged: layer {name!r}: {error}") from error
    statistics, corrections = _popped(tensors, "statistics:"), _popped(tensors, "correction:")
    try:
        moves = _moves(header.get("moves", {}), tensors)
        digests = _digests(header["digests"], masks, tensors) if "digests" in header else None
        return MaskSet(masks, statistics, recipe, moves, digests, corrections)
    except (HalveError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path} is damaged: its moves, digests or corrections: {error}") from error


def _popped(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors of one kind, and return them by name."""
    names = [key for key in tensors if key.startswith(prefix)]
    return {key.removeprefix(prefix): tensors.pop(key) for key in names}


def _digests(entry: Any, masks: Mapping[str, Mask], tensors: dict[str, Tensor]) -> Digests:
    if entry.keys() != {"tensors", "tied"}:
        raise ValueError("digests must have the keys tensors and tied")
    dtypes, tied = {name: _dtype(text) for name, text in entry["tensors"].items()}, dict(entry["tied"])
    if not all(isinstance(other, str) for other in tied.values()):
        raise ValueError("tied tensors must be names")
    masked = {name: dtypes[tied.get(weight_name(name), weight_name(name))] for name in masks}
    stored = tensors.pop("digests")
    count = sum(len(dtypes_of(dtype)) for dtype in (*dtypes.values(), *masked.values()))
    if stored.dtype != torch.uint8 or tuple(stored.shape) != (count, _DIGEST):
        raise ValueError(f"expected {count} digests of {_DIGEST} bytes")
    rows = iter(stored.numpy())
    dense = {name: {each: next(rows).tobytes().hex() for each in dtypes_of(dtype)} for name, dtype in dtypes.items()}
    left = {name: {each: next(rows).tobytes().hex() for each in dtypes_of(dtype)} for name, dtype in masked.items()}
    return Digests(dense, left, tied)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{str(name)[:40]!r} is not a dtype")
    return _DTYPES[name]


_DTYPES = {_dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _moves(entry: Any, tensors: dict[str, Tensor]) -> Moves:
    keys = [(dim, number) for dims in entry.values() for dim, number in dims.items()]
    if not all(type(number) is int and str(int(dim)) == dim for dim, number in keys):
        raise ValueError("dimensions and order numbers must be integers")
    numbers = {number for _, number in keys}
    orders = {number: tensors.pop(f"order:{number}") for number in numbers}
    if any(order.dtype != torch.int32 or order.dim() != 1 for order in orders.values()):
        raise ValueError("an order must be a 1-d int32 tensor")
    tuples = {number: tuple(order.tolist()) for number, order in orders.items()}
    return {name: {int(dim): tuples[number] for dim, number in dims.items()} for name, dims in entry.items()}


def _describe(mask: Mask) -> dict[str, Any]:
    layout = mask.layout
    return {
        "pattern": str(mask.pattern),
        "kind": layout.kind,
        "shape": list(layout.shape),
        "groups": layout.groups,
        "order": layout.order,
        "pad": layout.pad,
        "shared_with": list(mask.shared_with),
        "dense": mask.fingerprint.dense if mask.fingerprint else None,
        "masked": mask.fingerprint.masked if mask.fingerprint else None,
    }


def _rebuild(name: str, entry: Any, tensors: dict[str, Tensor], codes_of: Any) -> Mask:
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise ValueError(f"an entry must have the keys {', '.join(sorted(_KEYS))}")
    shape, groups, shared = entry["shape"], entry["groups"], entry["shared_with"]
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in [*shape, groups]):
        raise ValueError("shape and groups must be positive integers")
    if not isinstance(shared, list) or not all(isinstance(other, str) for other in shared):
        raise ValueError("shared_with must be a list of names")
    if not all(isinstance(entry[key], str) for key in _TEXTS) or not isinstance(entry["pad"], bool):
        raise ValueError(f"{', '.join(sorted(_TEXTS))} must be strings, pad true or false")
    weights = 1
    for size in shape:
        if (weights := weights * size) > _MAX_WEIGHTS:
            raise ValueError(f"more than {_MAX_WEIGHTS} weights")
    pattern = Pattern(entry["pattern"])
    channel_order = tensors.pop(f"channel_order:{name}", None)
    if channel_order is not None and (channel_order.dtype != torch.int32 or channel_order.dim() != 1):
        raise ValueError("the channel order must be a 1-d int32 tensor")
    layout = Layout(
        entry["kind"],
        tuple(shape),
        pattern.size,
        groups,
        entry["order"],
        entry["pad"],
        None if channel_order is None else tuple(channel_order.tolist()),
    )
    return Mask(pattern, layout, codes_of(name, pattern, layout), _fingerprint(name, entry, tensors), tuple(shared))


def _fingerprint(name: str, entry: Mapping[str, Any], tensors: dict[str, Tensor]) -> Fingerprint | None:
    dense, masked = entry["dense"], entry["masked"]
    if dense is None and masked is None:
        return None
    sketch = tensors.pop(f"sketch:{name}")
    if sketch.dtype != torch.float32 or tuple(sketch.shape) != (2, SKETCH) or not bool(sketch.isfinite().all()):
        raise ValueError(f"the sketch must be a finite float32 tensor of shape (2, {SKETCH})")
    if not all(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) for digest in (dense, masked)):
        raise ValueError("digests must be 64 hexadecimal digits")
    return Fingerprint(dense, masked, *(tuple(numbers) for numbers in sketch.tolist()))
