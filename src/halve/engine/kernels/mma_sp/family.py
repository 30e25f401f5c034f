"""2:4 convolutions and Linear layers on sparse tensor cores (`mma.sp`, compute capability 8.0 and up).

Two families share the source: `mma_sp` multiplies only the kept weights, `mma` all of them. `mma` is the dense baseline
of the same kernel: it isolates the effect of sparsity, and can be the fastest kernel for layers that are not 2:4.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.kernel import KernelFamily, Layout, Piece
from halve.engine.kernels.mma_sp import launch
from halve.engine.kernels.mma_sp.packing import pack, pack_dense, packed_shapes, restored
from halve.engine.operations import Convolution, Linear, Operation, Tensors, finish
from halve.errors import EngineError

_NHWC = torch.channels_last


class _Mma(KernelFamily):
    device_type = "cuda"
    reads = writes = Layout.NHWC

    @property
    def version(self) -> str:
        return launch.version()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if (reason := driver.unavailable(device)) is not None:
            return reason
        if dtype not in launch.DTYPES:
            return f"our sparse kernels need float16 or bfloat16, got {dtype}: pass dtype=torch.float16"
        return jit.unavailable()

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, Convolution | Linear) or piece.dtype not in launch.DTYPES:
            return ()
        convolution = operation.convolution
        if convolution.groups > 1 or convolution.channels % 4 or (self.sparse and not piece.is_2_4):
            return ()
        return tuple(launch.TILES)

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        packed = self._pack_weight(tensors["weight"].reshape(_convolution(operation).weight_shape))
        return {**packed, "bias": tensors["bias"]} if "bias" in tensors else packed

    @abstractmethod
    def _pack_weight(self, weight: Tensor) -> dict[str, Tensor]: ...

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        weight = restored(packed["values"], packed.get("metadata"), _convolution(operation).weight_shape)
        weight = weight.flatten(1) if isinstance(operation, Linear) else weight
        return {"weight": weight, "bias": packed["bias"]} if "bias" in packed else {"weight": weight}

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        x, convolution = inputs[0], _convolution(operation)
        if isinstance(operation, Linear):
            if not x.numel():
                return x.new_empty(operation.out_shape(x.shape))  # convolutions need at least one pixel
            images = [_as_image(tensor) for tensor in inputs]
            y = self._convolve(images, packed, convolution, variant)
            return y.permute(0, 2, 3, 1).reshape(operation.out_shape(x.shape))
        return self._convolve(inputs, packed, convolution, variant)

    def _convolve(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution, tile: str) -> Tensor:
        x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
        values, metadata, bias = packed["values"], packed.get("metadata"), packed.get("bias")
        operands = launch.Operands(x, values, metadata, bias, residual)
        _check(operands, convolution)
        if x.is_cuda:
            residual = None if residual is None else _readable(residual)
            return launch.run(operands._replace(x=_readable(x), residual=residual), convolution, tile)
        weight = restored(values, metadata, convolution.weight_shape)
        y = F.conv2d(x, weight, None, convolution.stride, convolution.padding, convolution.dilation)
        if bias is not None:
            y = (y.float() + bias.reshape(1, -1, 1, 1)).to(x.dtype)
        return finish(y, inputs[1:], convolution.activation).contiguous(memory_format=_NHWC)


class MmaSparse(_Mma):
    name = "mma_sp"
    sparse = True

    def _pack_weight(self, weight: Tensor) -> dict[str, Tensor]:
        packed = pack(weight, weight != 0)
        return {"values": packed.values, "metadata": packed.metadata}


class MmaDense(_Mma):
    name = "mma"

    def _pack_weight(self, weight: Tensor) -> dict[str, Tensor]:
        return {"values": pack_dense(weight)}


def _convolution(operation: Operation) -> Convolution:
    assert isinstance(operation, Convolution | Linear)
    return operation.convolution


def _readable(x: Tensor) -> Tensor:
    """A channels-last tensor aligned to 16 bytes. Slices may start at any address."""
    x = x.contiguous(memory_format=_NHWC)
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=_NHWC)


def _as_image(x: Tensor) -> Tensor:
    """(..., C) -> (1, C, rows, 1), channels last."""
    return x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)


def _check(operands: launch.Operands, convolution: Convolution) -> None:
    """Raise `EngineError` if the kernel would misread the arguments or read out of bounds."""
    x, values, metadata, bias, residual = operands
    rows, channels = convolution.rows, convolution.channels
    if x.dim() != 4 or x.shape[1] != channels:
        raise EngineError(f"the input must have shape (N, {channels}, H, W), got {tuple(x.shape)}")
    expected = convolution.out_shape(x.shape)
    if residual is not None and residual.shape != expected:
        raise EngineError(
            f"the residual must have the shape of the result, {tuple(expected)}, got {tuple(residual.shape)}"
        )
    for name, tensor in operands._asdict().items():
        if tensor is not None and tensor.device != x.device:
            raise EngineError(f"the input is on {x.device}, the {name} on {tensor.device}: move the model or the input")
    for name, tensor in (("weight", values), ("residual", residual)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise EngineError(f"the input is {x.dtype}, the {name} {tensor.dtype}: convert the input")
    if bias is not None and (bias.dtype != torch.float32 or bias.numel() != rows or not bias.is_contiguous()):
        raise EngineError(
            f"the bias must be a contiguous float32 tensor of {rows} values, got {bias.numel()} in {bias.dtype}"
        )
    shapes = packed_shapes(convolution.weight_shape, sparse=metadata is not None)
    for name, tensor, shape in zip(("values", "metadata"), (values, metadata), shapes, strict=True):
        if tensor is not None and (tuple(tensor.shape) != shape or not tensor.is_contiguous()):
            raise EngineError(
                f"the {name} of a weight of shape {convolution.weight_shape} must be contiguous with shape {shape}, "
                f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if metadata is not None and metadata.dtype != torch.int32:
        raise EngineError(f"the metadata must be int32, got {metadata.dtype}")
