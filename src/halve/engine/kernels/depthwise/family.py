"""Depthwise convolutions: one small filter per channel, on the ordinary arithmetic units of a GPU from 8.0 on.

Nothing is multiplied but what the filters hold: they have no input channels of which half could be left out.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.cuda.convolution import ConvolutionFamily
from halve.engine.kernels.depthwise import launch
from halve.engine.kernels.depthwise.packing import pack, unpack
from halve.engine.kernels.kernel import Piece
from halve.engine.operations import Convolution, Operation, Tensors


class Depthwise(ConvolutionFamily):
    name = "depthwise"

    @property
    def version(self) -> str:
        return launch.version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if dtype not in launch.DTYPES:
            return f"our depthwise kernels need float16 or bfloat16, got {dtype}: pass dtype=torch.float16"
        return driver.unavailable(device) or jit.unavailable()

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, Convolution) or piece.dtype not in launch.DTYPES:
            return ()
        return tuple(launch.tiles(operation)) if launch.supported(operation) else ()

    def compilation(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> partial[Any] | None:
        assert isinstance(operation, Convolution)
        described = launch.Variant(operation, inputs[0].dtype, len(inputs) > 1, variant)
        return partial(launch.machine_code, described, driver.architecture(inputs[0].device.index))

    def pack_weight(self, weight: Tensor, convolution: Convolution) -> dict[str, Tensor]:
        return {"values": pack(weight)}

    def unpack_weight(self, packed: Tensors, convolution: Convolution) -> Tensor:
        return unpack(packed["values"])

    def packed_shapes(self, convolution: Convolution) -> dict[str, tuple[int, ...]]:
        return {"values": (*convolution.kernel, convolution.rows)}

    def launch(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution, variant: str) -> Tensor:
        residual = inputs[1] if len(inputs) > 1 else None
        operands = launch.Operands(inputs[0], packed["values"], packed.get("bias"), packed.get("scale"), residual)
        return launch.run(operands, convolution, variant)
