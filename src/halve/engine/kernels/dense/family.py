"""Dense kernels of PyTorch, cuDNN and cuBLAS: the fallback on every device, and the baseline.

Variants: `torch` is unfused PyTorch; `cudnn` is cuDNN's fused convolution, bias, residual and ReLU; `gemm` is a matrix
product, with bias and ReLU fused if cuBLAS supports it. Max pooling behind a convolution is ours.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.engine.kernels.kernel import KernelFamily, Piece
from halve.engine.kernels.pool.family import Pool
from halve.engine.operations import Convolution, Linear, MaxPool, Operation, PooledConvolution, Tensors, finish

_NHWC = torch.channels_last
_VECTORS = ("bias", "scale")


class Dense(KernelFamily):
    """Keeps weights unpacked, channels last, and biases and scales both exact and in the weight's dtype."""

    name = "dense"
    library = True
    version = "1"  # versions of the libraries are part of the timing cache's file name

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        found, operation = ["torch"], piece.operation
        if device.type != "cuda" or getattr(operation, "scaled", False):
            return found
        if isinstance(operation, Convolution | PooledConvolution) and operation.activation == "relu":
            found.append("cudnn")
        if isinstance(operation, Convolution | Linear) and operation.pointwise:
            found.append("gemm")
        return found

    def inlined(self, variant: str) -> bool:
        return variant != "cudnn"  # compilers do not fuse bias, residual and ReLU into convolutions

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        packed = dict(tensors)
        if isinstance(operation, Convolution | PooledConvolution):
            packed["weight"] = tensors["weight"].contiguous(memory_format=_NHWC)
        for name in _VECTORS:
            if name in tensors and tensors[name].dtype != tensors["weight"].dtype:
                packed[f"rounded_{name}"] = tensors[name].to(tensors["weight"].dtype)
        return packed

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in packed.items() if not name.startswith("rounded_")}

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        if isinstance(operation, PooledConvolution):
            y = self.run(inputs, packed, operation.convolution, variant)
            return Pool().run([Pool.reads.of(y)], {}, operation.pool, "nhwc")
        x, residual = inputs[0], inputs[1:]
        weight, bias = packed.get("weight"), packed.get("rounded_bias", packed.get("bias"))
        if weight is None or not x.is_cuda or not x.numel() or isinstance(operation, MaxPool):
            return operation.reference(inputs, _read(packed))
        if variant == "cudnn" and isinstance(operation, Convolution) and operation.activation == "relu":
            geometry = (operation.stride, operation.padding, operation.dilation, operation.groups)
            if residual:
                return torch.cudnn_convolution_add_relu(x, weight, residual[0], 1.0, bias, *geometry)
            return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
        if variant == "gemm" and isinstance(operation, Linear):
            return _product(x, weight, bias, residual, operation.activation)
        if variant == "gemm" and isinstance(operation, Convolution) and x.is_contiguous(memory_format=_NHWC):
            pixels, added = x.permute(0, 2, 3, 1), [r.permute(0, 2, 3, 1) for r in residual]
            return _product(pixels, weight.flatten(1), bias, added, operation.activation).permute(0, 3, 1, 2)
        return operation.reference(inputs, _read(packed))

    def fake(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation) -> Tensor:
        return operation.reference(inputs, _read(packed))  # plain PyTorch also runs on fake tensors


def _read(packed: Tensors) -> dict[str, Tensor]:
    """The tensors, with bias and scale in the weight's dtype."""
    return {**packed, **{name: packed[f"rounded_{name}"] for name in _VECTORS if f"rounded_{name}" in packed}}


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Sequence[Tensor], activation: str) -> Tensor:
    """activation(x matrix^T + bias + residual)"""
    if not residual and bias is not None and activation in ("none", "relu"):
        flat = x.reshape(-1, x.shape[-1])
        y = torch.addmm(bias, flat, matrix.T) if activation == "none" else torch._addmm_activation(bias, flat, matrix.T)
        return y.reshape(*x.shape[:-1], len(matrix))
    return finish(F.linear(x, matrix, bias), residual, activation)
