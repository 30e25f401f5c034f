"""The source of the convolution kernel and its variants. What it computes is specified by `halve.engine.ops.conv2d`."""

from importlib import resources
from typing import NamedTuple

import torch

from halve.engine.cuda import jit
from halve.engine.ops import ACTIVATIONS
from halve.errors import EngineError

DTYPES = (torch.float16, torch.bfloat16)
SHARED_BYTES = 3 * 128 * 64 * 2  # three tiles of 128 pixels by 64 channels
TILE_PIXELS, TILE_ROWS, THREADS = 128, 64, 128


class Variant(NamedTuple):
    """What is fixed when the kernel is compiled."""

    sparse: bool
    dtype: torch.dtype
    channels: int  # of the input: a multiple of 8 is copied faster
    activation: str

    def options(self) -> list[str]:
        """Definitions for the compiler."""
        if self.dtype not in DTYPES:
            raise EngineError(f"the kernel multiplies float16 and bfloat16, not {self.dtype}")
        if self.channels % 4:
            raise EngineError(f"{self.channels} input channels: the kernel needs a multiple of 4")
        piece = 8 if self.channels % 8 == 0 else 4
        number = list(ACTIVATIONS).index(self.activation)
        return [
            f"-DSPARSE={int(self.sparse)}",
            f"-DBF16={int(self.dtype == torch.bfloat16)}",
            f"-DPIECE={piece}",
            f"-DACTIVATION={number}",
        ]


def machine_code(variant: Variant, architecture: str) -> bytes:
    """The cubin of a variant, compiled now or before."""
    source = resources.files(__package__).joinpath("conv.cu").read_text()
    return jit.cubin(source, architecture, variant.options())
