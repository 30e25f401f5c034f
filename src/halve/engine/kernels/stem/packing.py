"""Pack the weight of a first layer: 64 output channels by 7 kernel rows of 8 pixels with 4 channels.

There are zeros where the weight has fewer pixels and channels. A step of 16 columns is laid out in core matrices of 8
rows by 8 values, as `wgmma` reads them.
"""

import torch.nn.functional as F
from torch import Tensor

SHAPE = (7, 2, 1024)  # kernel row, step, element


def pack(weight: Tensor) -> Tensor:
    """Pack a weight of shape (64, 3, 7, 7).

    >>> import torch
    >>> weight = torch.randn(64, 3, 7, 7)
    >>> pack(weight).shape, torch.equal(unpack(pack(weight)), weight)
    (torch.Size([7, 2, 1024]), True)
    """
    x = F.pad(weight, (0, 1, 0, 0, 0, 1)).permute(2, 3, 1, 0)  # kernel row, pixel, channel, row
    x = x.reshape(7, 2, 2, 8, 8, 8)  # kernel row, step, value / 8, value % 8, row / 8, row % 8
    return x.permute(0, 1, 4, 2, 5, 3).reshape(SHAPE).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Restore the weight."""
    x = packed.reshape(7, 2, 8, 2, 8, 8).permute(0, 1, 3, 5, 2, 4)
    return x.reshape(7, 8, 4, 64).permute(3, 2, 0, 1)[:, :3, :, :7].contiguous()
