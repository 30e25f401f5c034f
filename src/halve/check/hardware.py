"""Which hardware can accelerate which layer: rules on shapes and zeros, no kernels.

Both rules ask for 2:4 where it counts: of every four neighbouring input channels at one kernel position, in the
checkpoint's own channel order, at most two weights are not zero. 1:2 and 1:4 masks satisfy that as well.

- TensorRT (`SPARSE_WEIGHTS`) takes such weights for ungrouped convolutions and for matrix products.
- Sparse tensor cores multiply fp16 and bf16 in tiles of 16 dense columns by 8 rows; libraries that do not pad
  (cuSPARSELt, Apex ASP's own rule) need the channels to be multiples of those.
"""

from typing import NamedTuple

from torch import Tensor

from halve.masks.layout import Layout
from halve.modules import Kind

_TILE_COLUMNS, _TILE_ROWS = 16, 8


class Eligible(NamedTuple):
    """Why a path cannot take the layer; None where it can."""

    tensorrt: str | None
    tensor_cores: str | None


def eligibility(kind: Kind, groups: int, kept: Tensor) -> Eligible:
    """What sparse paths could do with a layer whose weight is zero wherever `kept` (of its shape) is False.

    >>> import torch
    >>> kept = torch.tensor([True, False, True, False]).repeat(16, 8)
    >>> eligibility("linear", 1, kept)
    Eligible(tensorrt=None, tensor_cores=None)
    >>> eligibility("linear", 1, kept[:, :12]).tensor_cores
    '12 input channels are no multiple of 16'
    """
    reason = _not_sparse(kind, groups, kept)
    if reason is not None:
        return Eligible(reason, reason)
    layout = Layout(kind, tuple(kept.shape), block=4, pad=True)
    if layout.channels % _TILE_COLUMNS:
        return Eligible(None, f"{layout.channels} input channels are no multiple of {_TILE_COLUMNS}")
    if layout.rows % _TILE_ROWS:
        return Eligible(None, f"{layout.rows} output channels are no multiple of {_TILE_ROWS}")
    return Eligible(None, None)


def _not_sparse(kind: Kind, groups: int, kept: Tensor) -> str | None:
    if groups > 1:
        return f"grouped convolution ({groups} groups)"
    if kind == "conv_transpose":
        return "transposed convolution"
    layout = Layout(kind, tuple(kept.shape), block=4, pad=True)
    crowded = (layout.to_blocks(kept.float()).sum(-1) > 2).sum().item()
    if crowded:
        total = layout.rows * layout.blocks
        return f"{crowded:,} of {total:,} blocks of 4 input channels have more than 2 weights that are not zero"
    if layout.virtual:
        return f"{layout.channels} input channels are no multiple of 4"
    return None
