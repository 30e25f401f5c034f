"""What a layer computes, apart from its numbers: kernel, stride, padding, dilation, activation."""

from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("none", "relu", "gelu", "silu", "hardswish")  # the kernels count them in this order


@dataclass(frozen=True)
class Geometry:
    """Of a convolution; a Linear layer is one of kernel 1 x 1.

    >>> Geometry(rows=64, channels=32, kernel=(3, 3), stride=(2, 2), padding=(1, 1)).out_size(56, 56)
    (28, 28)
    """

    rows: int  # output channels
    channels: int  # input channels of one group
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    activation: str = "none"

    def out_size(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Height and width of the result."""
        sizes = [
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        return sizes[0], sizes[1]

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.rows, self.channels, *self.kernel

    @property
    def pointwise(self) -> bool:
        """Whether each pixel is handled by itself: a matrix product."""
        return self.kernel == self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1
