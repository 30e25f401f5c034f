"""Pack the weight of a depthwise convolution: the channels of one kernel position lie together, as in NHWC images."""

from torch import Tensor


def pack(weight: Tensor) -> Tensor:
    """Pack a weight of shape (channels, 1, height, width).

    >>> import torch
    >>> weight = torch.randn(16, 1, 3, 3)
    >>> pack(weight).shape, torch.equal(unpack(pack(weight)), weight)
    (torch.Size([3, 3, 16]), True)
    """
    return weight.squeeze(1).permute(1, 2, 0).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Restore the weight."""
    return packed.permute(2, 0, 1).unsqueeze(1).contiguous()
