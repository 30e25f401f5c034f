"""2:4 convolutions and Linear layers on CPUs with AVX-512, as machine code that is emitted for each layer.

Two families share the emitter: `cpu_sp` multiplies only the kept weights, `cpu` all of them. `cpu` is the dense baseline
of the same kernel: it isolates the effect of sparsity, and can be the fastest kernel for layers that are not 2:4.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halve.engine.kernels.cpu_sp import features, memory
from halve.engine.kernels.cpu_sp.packing import Packed, group_width, pack, pack_dense, packed_shapes, unpack
from halve.engine.kernels.cpu_sp.program import ARITHMETIC, program_for
from halve.engine.kernels.cpu_sp.version import version
from halve.engine.kernels.kernel import KernelFamily, Layout, Piece
from halve.engine.kernels.planes import is_planes
from halve.engine.operations import ACTIVATIONS, Convolution, Linear, Operation, Tensors
from halve.errors import EngineError

MAX_VALUES = 8 << 20  # of a layer: 10 bytes of code each, or 5 in bfloat16
_EMITTED = ("none", "relu")  # activations; others run in PyTorch afterwards
_WIDTH = 4


class _Cpu(KernelFamily):
    reads = writes = Layout.PLANES

    @property
    def version(self) -> str:
        return version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return features.unavailable(device, dtype, ARITHMETIC) or memory.unavailable()

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, Convolution | Linear) or piece.dtype not in ARITHMETIC:
            return ()
        convolution = operation.convolution
        if convolution.groups > 1 or (self.sparse and (convolution.channels % _WIDTH or not piece.is_2_4)):
            return ()
        values, _ = packed_shapes(convolution.weight_shape, self.sparse)
        return ("avx512",) if math.prod(values) <= MAX_VALUES else ()

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        weight = tensors["weight"].reshape(_convolution(operation).weight_shape)
        values, codes = pack(weight) if self.sparse else pack_dense(weight)
        packed = {"values": values} if codes is None else {"values": values, "codes": codes}
        return {**packed, "bias": tensors["bias"]} if "bias" in tensors else packed

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        weight = unpack(Packed(packed["values"], packed.get("codes")), _convolution(operation).weight_shape)
        weight = weight.flatten(1) if isinstance(operation, Linear) else weight
        return {"weight": weight, "bias": packed["bias"]} if "bias" in packed else {"weight": weight}

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        x, convolution = inputs[0], _convolution(operation)
        if isinstance(operation, Linear):
            if not x.numel():
                return self.fake(inputs, packed, operation)
            y = self._convolve([_as_image(tensor) for tensor in inputs], packed, convolution)
            return y.permute(0, 2, 3, 1).as_strided(
                operation.out_shape(x.shape), _strides(operation.out_shape(x.shape), y.stride(1))
            )
        return self._convolve(inputs, packed, convolution)

    def _convolve(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution) -> Tensor:
        x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
        weights, bias = Packed(packed["values"], packed.get("codes")), packed.get("bias")
        _check(x, residual, weights, bias, convolution)
        relu = convolution.activation == "relu"
        width = _WIDTH if self.sparse else group_width(convolution.channels)
        y = program_for(weights, bias, width, relu).run(x, residual, convolution)
        if convolution.activation not in _EMITTED:
            ACTIVATIONS[convolution.activation].aten.overloadpacket.out(y, out=y)  # in place, which keeps the layout
        return y


class CpuSparse(_Cpu):
    name = "cpu_sp"
    sparse = True


class CpuDense(_Cpu):
    name = "cpu"


def _convolution(operation: Operation) -> Convolution:
    assert isinstance(operation, Convolution | Linear)
    return operation.convolution


def _as_image(x: Tensor) -> Tensor:
    """(..., C) -> (1, C, rows, 1), planes."""
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    return x.as_strided((1, channels, rows, 1), (channels * x.stride(-1), x.stride(-1), 1, 1))


def _strides(shape: Sequence[int], pitch: int) -> list[int]:
    """The strides of a tensor of this shape that is stored as planes, with channels last."""
    strides, pixels = [pitch], 1
    for size in reversed(shape[:-1]):
        strides.insert(0, pixels)
        pixels *= size
    return strides


def _check(x: Tensor, residual: Tensor | None, weights: Packed, bias: Tensor | None, convolution: Convolution) -> None:
    """Raise `EngineError` if the code would misread the arguments or touch memory outside of them."""
    rows, channels = convolution.rows, convolution.channels
    if x.dim() != 4 or x.shape[1] != channels:
        raise EngineError(f"the input must have shape (N, {channels}, H, W), got {tuple(x.shape)}")
    expected = convolution.out_shape(x.shape)
    if min(*expected, *x.shape, *convolution.kernel, *convolution.stride, *convolution.dilation) < 1:
        raise EngineError(f"{convolution} has no output on an input of shape {tuple(x.shape)}")
    if residual is not None and residual.shape != expected:
        raise EngineError(
            f"the residual must have the shape of the result, {tuple(expected)}, got {tuple(residual.shape)}"
        )
    values, codes = packed_shapes(convolution.weight_shape, sparse=weights.codes is not None)
    for name, tensor, dtype, shape in (
        ("values", weights.values, x.dtype, values),
        ("codes", weights.codes, torch.uint8, codes),
        ("bias", bias, torch.float32, (rows,)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device):
            raise EngineError(
                f"the {name} of a weight of shape {convolution.weight_shape} must have shape {shape} in {dtype} on "
                f"{x.device}, got {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
            )
    for name, tensor in (("input", x), ("residual", residual)):
        if tensor is not None and (tensor.dtype not in ARITHMETIC or tensor.dtype != x.dtype):
            raise EngineError(
                f"the {name} is {tensor.dtype}: input, residual and weight must share float32 or bfloat16"
            )
        if tensor is not None and not is_planes(tensor, 1):
            raise EngineError(f"the {name} must be stored as planes, got strides {tensor.stride()}")
