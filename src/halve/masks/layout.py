"""How a weight is cut into blocks of M, and put back together.

By default blocks run along the input channels at one kernel position (K order: kernel position, channel), which is what
sparse hardware multiplies. The channels may be permuted first. `order="flat"` is the paper's: each row's
`c_in * kh * kw` axis as it lies in memory. It exists for reproduction; no hardware can use it for kernels over 1x1.

If a row is not divisible by M, `pad=True` appends virtual zero columns. A virtual column never takes a kept place
that a real weight could have.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.errors import MaskError
from halve.modules import KINDS, Kind

Order = Literal["channels", "flat"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class Layout:
    """How one weight is cut into blocks.

    Args:
        kind: "linear", "conv" or "conv_transpose".
        shape: Shape of the weight.
        block: Block size M.
        groups: Groups of the convolution.
        order: "channels" for blocks along input channels, or "flat".
        pad: Append virtual zero columns if a row is not divisible by M.
        channel_order: For each group a permutation of its input channels, concatenated; None if not permuted.

    >>> layout = Layout("conv", (8, 16, 3, 3), block=4)
    >>> layout.rows, layout.blocks
    (8, 36)
    >>> weight = torch.randn(8, 16, 3, 3)
    >>> blocks = layout.to_blocks(weight)
    >>> torch.equal(blocks[5, 4], weight[5, 0:4, 0, 1])  # four input channels at one kernel position
    True
    >>> torch.equal(layout.from_blocks(blocks), weight)
    True
    """

    kind: Kind
    shape: tuple[int, ...]
    block: int
    groups: int = 1
    order: Order = "channels"
    pad: bool = False
    channel_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.order not in ORDERS:
            raise MaskError(
                f"a layout's kind must be one of {KINDS} and its order one of {ORDERS}; "
                f"got kind={self.kind!r}, order={self.order!r}"
            )
        if len(self.shape) < 2 or (self.kind == "linear" and len(self.shape) != 2) or min(self.shape) < 1:
            raise MaskError(f"a {self.kind} weight cannot have shape {self.shape}")
        if self.groups < 1 or self.shape[0] % self.groups or (self.kind == "linear" and self.groups != 1):
            raise MaskError(f"a {self.kind} weight of shape {self.shape} cannot have {self.groups} groups")
        if self.block < 1:
            raise MaskError(f"the block size must be at least 1, got {self.block}")
        if self.columns % self.block and not self.pad:
            what = "input channels" if self.order == "channels" else "weights per row"
            raise MaskError(f"{self.columns} {what}, not divisible by {self.block}; remainder='pad' pads them")
        if self.channel_order is not None:
            self._check_channel_order(self.channel_order)

    def _check_channel_order(self, order: tuple[int, ...]) -> None:
        if self.order == "flat":
            raise MaskError("order='flat' cannot have a channel order; use order='channels'")
        size = self.channels
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        if len(order) != self.groups * size or any(sorted(part) != list(range(size)) for part in parts):
            raise MaskError(f"a channel order must be a permutation of 0..{size - 1} for each of {self.groups} groups")

    @property
    def rows(self) -> int:
        """Number of output channels."""
        return self.shape[0] if self.kind != "conv_transpose" else self.shape[1] * self.groups

    @property
    def channels(self) -> int:
        """Number of input channels per row."""
        return self.shape[1] if self.kind != "conv_transpose" else self.shape[0] // self.groups

    @property
    def positions(self) -> int:
        """Number of kernel positions."""
        return math.prod(self.shape[2:])

    @property
    def columns(self) -> int:
        """Real columns per segment. Each segment is padded and cut into blocks separately."""
        return self.channels if self.order == "channels" else self.channels * self.positions

    @property
    def segments(self) -> int:
        """Segments per row: one for each kernel position, or a single one if flat."""
        return self.positions if self.order == "channels" else 1

    @property
    def blocks(self) -> int:
        """Blocks per row."""
        return self.segments * math.ceil(self.columns / self.block)

    @property
    def virtual(self) -> int:
        """Virtual columns at the end of each segment."""
        return -self.columns % self.block

    @property
    def weights(self) -> int:
        """Number of real weights."""
        return math.prod(self.shape)

    def to_blocks(self, weight: Tensor, fill: float = 0.0) -> Tensor:
        """The weight as (rows, blocks, M), with `fill` in virtual columns. Differentiable."""
        if tuple(weight.shape) != self.shape:
            raise MaskError(f"expected a weight of shape {self.shape}, got {tuple(weight.shape)}")
        per_group = self.rows // self.groups
        if self.kind == "conv_transpose":
            x = weight.reshape(self.groups, self.channels, per_group, self.positions).transpose(1, 2)
        else:
            x = weight.reshape(self.groups, per_group, self.channels, self.positions)
        if self.order == "channels":
            x = x.transpose(2, 3)
        x = x.reshape(self.groups, per_group, self.segments, self.columns)
        if self.channel_order is not None:
            there, back = self.orders(x.device)
            x = _Permute.apply(x, there, back)
        if self.virtual:
            x = F.pad(x, (0, self.virtual), value=fill)
        return x.reshape(self.rows, self.blocks, self.block)

    def from_blocks(self, blocks: Tensor, orders: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The inverse of `to_blocks`: a weight without the virtual columns. Differentiable.

        Args:
            blocks: Tensor of shape (rows, blocks, M).
            orders: What `self.orders(device)` returns, for callers that cache it.
        """
        if tuple(blocks.shape) != (self.rows, self.blocks, self.block):
            raise MaskError(
                f"expected blocks of shape {(self.rows, self.blocks, self.block)}, got {tuple(blocks.shape)}"
            )
        per_group = self.rows // self.groups
        x = blocks.reshape(self.groups, per_group, self.segments, self.columns + self.virtual)[..., : self.columns]
        if self.channel_order is not None:
            there, back = orders or self.orders(x.device)
            x = _Permute.apply(x, back, there)
        if self.order == "channels":
            x = x.transpose(2, 3)
        x = x.reshape(self.groups, per_group, self.channels, self.positions)
        if self.kind == "conv_transpose":
            x = x.transpose(1, 2)
        return x.reshape(self.shape)

    def flat_index(self, row: Tensor, block: Tensor, place: Tensor, order: Tensor | None = None) -> Tensor:
        """Index into the flattened weight of each place in a block; -1 for a virtual column.

        Unlike `from_blocks`, this needs no tensor as large as all blocks, which may be mostly virtual.

        Args:
            row: Rows of the blocks.
            block: Blocks within their rows.
            place: Places within their blocks.
            order: `channel_order` as a tensor; required if there is one.

        >>> layout = Layout("linear", (2, 3), block=4, pad=True)
        >>> layout.flat_index(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]), torch.tensor([0, 2, 3])).tolist()
        [0, 5, -1]
        """
        per_segment = self.blocks // self.segments
        segment, column = block // per_segment, block % per_segment * self.block + place
        virtual = column >= self.columns
        column = column.masked_fill(virtual, 0)
        per_group = self.rows // self.groups
        group, row = row // per_group, row % per_group
        if self.order == "flat":
            channel, position = column // self.positions, column % self.positions
        else:
            channel, position = column, segment
        if order is not None:
            channel = order[group * self.channels + channel]
        if self.kind == "conv_transpose":
            index = (group * self.channels + channel) * per_group + row
        else:
            index = (group * per_group + row) * self.channels + channel
        return (index * self.positions + position).masked_fill(virtual, -1)

    def real(self) -> Tensor:
        """Which places hold real weights: bool, (blocks, M), the same for every row."""
        segment = torch.arange(self.columns + self.virtual) < self.columns
        return segment.repeat(self.segments).reshape(self.blocks, self.block)

    def orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The channel order and its inverse as index tensors of shape (groups, 1, 1, channels)."""
        order = torch.tensor(self.channel_order or range(self.channels), device=device)
        order = order.reshape(self.groups, 1, 1, self.channels)
        return order, order.argsort(3)


class _Permute(torch.autograd.Function):
    """Permute columns. The backward permutes back, which is faster than the scatter-add of `gather`'s backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back, there)
        return x.gather(3, there.expand_as(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Permute.apply(grads[0], *ctx.saved_tensors), None, None


def unpermuted(layout: Layout) -> Layout:
    """The same layout without its channel order."""
    return layout if layout.channel_order is None else dataclasses.replace(layout, channel_order=None)
