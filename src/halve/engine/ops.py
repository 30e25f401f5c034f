"""The engine's operations: a convolution or Linear layer with bias, residual and activation in one; pooling.

Registered with torch.library, so that torch.compile and torch.export see them as they are. Each has a reference
implementation in plain PyTorch, which is also what runs where there is no kernel for it.

`conv2d` and `linear` take a dense weight. `packed_conv2d` takes one in the order of the kernels (see pack.py), 2:4 with
metadata or dense without, runs our kernel with a given tile, and gives images channels last; its bias is in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.engine.geometry import Geometry
from halve.engine.kernels.mma_sp import launch as cuda_conv
from halve.engine.kernels.mma_sp.packing import restored, sizes
from halve.engine.kernels.pool import launch as cuda_pool
from halve.errors import EngineError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
DENSE_WAYS = ("torch", "cudnn", "gemm")  # operation by operation; cuDNN's fused one; a matrix product
_NHWC = torch.channels_last


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    way: str = "torch",
) -> Tensor:
    """activation(conv(x, weight) + bias + residual); `way` is one of `DENSE_WAYS`, which differ on a GPU alone.

    >>> x, weight = torch.ones(1, 1, 2, 2), -torch.ones(1, 1, 1, 1)
    >>> conv2d(x, weight, None, torch.full_like(x, 3.0), [1, 1], [0, 0], [1, 1], 1, "relu").unique().tolist()
    [2.0]
    """
    return finished(F.conv2d(x, weight, bias, stride, padding, dilation, groups), residual, activation)


def _conv2d_on_gpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    way: str = "torch",
) -> Tensor:
    if way == "cudnn" and activation == "relu" and x.numel():  # a library that refuses to do nothing
        geometry = (stride, padding, dilation, groups)
        if residual is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
        return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *geometry)
    if way == "gemm" and x.is_contiguous(memory_format=_NHWC):
        pixels, matrix = x.permute(0, 2, 3, 1), weight.flatten(1)
        added = None if residual is None else residual.permute(0, 2, 3, 1)
        return product(pixels, matrix, bias, added, activation).permute(0, 3, 1, 2)
    return _conv2d(x, weight, bias, residual, stride, padding, dilation, groups, activation)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, way: str = "torch"
) -> Tensor:
    """activation(x weight^T + bias + residual)

    >>> linear(torch.ones(1, 2), torch.ones(3, 2), None, None, "none").tolist()
    [[2.0, 2.0, 2.0]]
    """
    return finished(F.linear(x, weight, bias), residual, activation)


def _linear_on_gpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, way: str = "torch"
) -> Tensor:
    if way == "gemm":
        return product(x, weight, bias, residual, activation)
    return _linear(x, weight, bias, residual, activation)


def product(x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """activation(x matrix^T + bias + residual), bias and activation inside of the product where cuBLAS can."""
    if residual is None and bias is not None and activation in ("none", "relu"):
        flat = x.reshape(-1, x.shape[-1])
        y = torch.addmm(bias, flat, matrix.T) if activation == "none" else torch._addmm_activation(bias, flat, matrix.T)
        return y.reshape(*x.shape[:-1], len(matrix))
    return finished(F.linear(x, matrix, bias), residual, activation)


def finished(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """activation(y + residual)"""
    y = y if residual is None else y + residual
    return ACTIVATIONS[activation](y)


def _packed_conv2d(
    x: Tensor,
    values: Tensor,
    metadata: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
    tile: str,
) -> Tensor:
    """As `conv2d`, of a weight of `shape` that is packed.

    >>> from halve.engine.kernels.mma_sp.packing import pack
    >>> weight = torch.tensor([1.0, 0.0, 0.0, 2.0]).reshape(1, 4, 1, 1)
    >>> values, metadata, _ = pack(weight, weight != 0)
    >>> x = torch.ones(1, 4, 1, 1)
    >>> packed_conv2d(x, values, metadata, None, None, [1, 4, 1, 1], [1, 1], [0, 0], [1, 1], "none", "64x64").item()
    3.0
    """
    _check(x, values, metadata, bias, residual, shape)
    geometry = _geometry(shape, stride, padding, dilation, activation)
    if residual is not None and residual.shape != (expected := _result_shape(x, geometry)):
        raise EngineError(f"the residual has shape {tuple(residual.shape)}, the result {expected}")
    if x.is_cuda:
        residual = None if residual is None else _readable(residual)
        return cuda_conv.run(_readable(x), values, metadata, bias, residual, geometry, tile)
    y = F.conv2d(x, restored(values, metadata, geometry.weight_shape), None, stride, padding, dilation)
    if bias is not None:
        y = (y.float() + bias.reshape(1, -1, 1, 1)).to(x.dtype)
    return finished(y, residual, activation).contiguous(memory_format=_NHWC)


def _packed_conv2d_fake(
    x: Tensor,
    values: Any,
    metadata: Any,
    bias: Any,
    residual: Any,
    shape: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    activation: str,
    tile: str,
) -> Tensor:
    size = _result_shape(x, _geometry(shape, stride, padding, dilation, activation))
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_NHWC)


def _geometry(
    shape: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], activation: str
) -> Geometry:
    rows, channels, *kernel = shape
    pairs = (_pair(kernel), _pair(stride), _pair(padding), _pair(dilation))
    return Geometry(rows, channels, *pairs, activation=activation)


def _result_shape(x: Tensor, geometry: Geometry) -> tuple[int, ...]:
    return (x.shape[0], geometry.rows, *geometry.out_size(x.shape[2], x.shape[3]))


def _packed_linear(
    x: Tensor,
    values: Tensor,
    metadata: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    rows: int,
    activation: str,
    tile: str,
) -> Tensor:
    """As `linear`, of a weight of so many rows that is packed: each row of x is a pixel of one tall image."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], rows)  # an image without pixels is none to PyTorch
    shape = [rows, x.shape[-1], 1, 1]
    image, added = _as_image(x), None if residual is None else _as_image(residual)
    y = _packed_conv2d(image, values, metadata, bias, added, shape, [1, 1], [0, 0], [1, 1], activation, tile)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], rows)


def _packed_linear_fake(
    x: Tensor, values: Any, metadata: Any, bias: Any, residual: Any, rows: int, activation: str, tile: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _max_pool2d(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Tensor:
    """The largest of each window, without where it was.

    >>> max_pool2d(torch.arange(4.0).reshape(1, 1, 2, 2), [2, 2], [2, 2], [0, 0], [1, 1], False).item()
    3.0
    """
    if not cuda_pool.fits(x, kernel):
        return torch.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
    shapes = x.new_empty(x.shape, device="meta")
    size = torch.max_pool2d(shapes, kernel, stride, padding, dilation, ceil_mode).shape[2:]
    return cuda_pool.run(x, kernel, stride, padding, dilation, size)


def _readable(x: Tensor) -> Tensor:
    """Channels last, beginning where 16 bytes can be read at once: a slice of one image may begin elsewhere."""
    x = x.contiguous(memory_format=_NHWC)
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=_NHWC)


def _as_image(x: Tensor) -> Tensor:
    """(..., C) -> (1, C, rows, 1), channels last."""
    return x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)


def _check(
    x: Tensor,
    values: Tensor,
    metadata: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    shape: Sequence[int],
) -> None:
    """What a kernel would read past, or read as something else."""
    if x.dim() != 4 or x.shape[1] != shape[1]:
        raise EngineError(f"the layer takes images of {shape[1]} channels (N, C, H, W), not shape {tuple(x.shape)}")
    others = {"values": values, "metadata": metadata, "bias": bias, "residual": residual}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise EngineError(f"the input is on {x.device}, the {name} on {tensor.device}: move the model or the input")
    for name, tensor in (("weight", values), ("residual", residual)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise EngineError(f"the input is {x.dtype}, the {name} {tensor.dtype}: convert the input")
    if bias is not None and (bias.dtype != torch.float32 or bias.numel() != shape[0] or not bias.is_contiguous()):
        raise EngineError(f"the bias must be {shape[0]} numbers in float32, not {bias.numel()} in {bias.dtype}")
    expected = sizes(shape, sparse=metadata is not None)
    for name, tensor, size in zip(("values", "metadata"), (values, metadata), expected, strict=True):
        if tensor is not None and (tuple(tensor.shape) != size or not tensor.is_contiguous()):
            raise EngineError(
                f"the {name} of a weight of shape {tuple(shape)} have shape {size} without gaps, "
                f"not {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if metadata is not None and metadata.dtype != torch.int32:
        raise EngineError(f"the metadata must be int32, not {metadata.dtype}")


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    first, second = numbers
    return first, second


conv2d = torch.library.custom_op("halve::conv2d", _conv2d, mutates_args=())
linear = torch.library.custom_op("halve::linear", _linear, mutates_args=())
packed_conv2d = torch.library.custom_op("halve::packed_conv2d", _packed_conv2d, mutates_args=())
packed_linear = torch.library.custom_op("halve::packed_linear", _packed_linear, mutates_args=())
max_pool2d = torch.library.custom_op("halve::max_pool2d", _max_pool2d, mutates_args=())
conv2d.register_kernel("cuda", _conv2d_on_gpu)
linear.register_kernel("cuda", _linear_on_gpu)
conv2d.register_fake(_conv2d)  # plain PyTorch runs on tensors without numbers as well
linear.register_fake(_linear)
max_pool2d.register_fake(torch.max_pool2d)
packed_conv2d.register_fake(_packed_conv2d_fake)
packed_linear.register_fake(_packed_linear_fake)
