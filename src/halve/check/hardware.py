"""Which hardware can accelerate a layer, judged by its shape and its zeros.

Both rules require 2:4 in place: of every four neighbouring input channels at one kernel position, at most two weights
are nonzero. 1:2 and 1:4 masks satisfy that too.

- TensorRT (`SPARSE_WEIGHTS`) accelerates ungrouped convolutions and matrix products with such weights.
- Sparse tensor cores multiply fp16 and bf16 in tiles of 16 dense columns by 8 rows. Libraries that do not pad
  (cuSPARSELt, Apex ASP) need channels divisible by these.
"""

from typing import NamedTuple

from torch import Tensor

from halve.masks.layout import Layout
from halve.modules import Kind

_TILE_COLUMNS, _TILE_ROWS = 16, 8


class Eligible(NamedTuple):
    """For TensorRT and for sparse tensor cores, why they cannot accelerate a layer; None if they can."""

    tensorrt: str | None
    tensor_cores: str | None


def eligibility(kind: Kind, groups: int, kept: Tensor) -> Eligible:
    """Whether hardware can accelerate a layer.

    Args:
        kind: The layer's kind.
        groups: Groups of the convolution.
        kept: Bool tensor of the weight's shape, False where the weight is zero.

    >>> import torch
    >>> kept = torch.tensor([True, False, True, False]).repeat(16, 8)
    >>> eligibility("linear", 1, kept)
    Eligible(tensorrt=None, tensor_cores=None)
    >>> eligibility("linear", 1, kept[:, :12]).tensor_cores
    '12 input channels, not divisible by 16'
    """
    reason = _not_sparse(kind, groups, kept)
    if reason is not None:
        return Eligible(reason, reason)
    layout = Layout(kind, tuple(kept.shape), block=4, pad=True)
    if layout.channels % _TILE_COLUMNS:
        return Eligible(None, f"{layout.channels} input channels, not divisible by {_TILE_COLUMNS}")
    if layout.rows % _TILE_ROWS:
        return Eligible(None, f"{layout.rows} output channels, not divisible by {_TILE_ROWS}")
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
        return f"{crowded:,} of {total:,} blocks of 4 input channels have more than 2 nonzero weights"
    if layout.virtual:
        return f"{layout.channels} input channels, not divisible by 4"
    return None
