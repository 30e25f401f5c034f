"""What CUDA kernel families for convolutions share: Linear layers as 1x1 convolutions, and checks of the arguments."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from halve.engine.kernels.kernel import KernelFamily, Layout
from halve.engine.operations import Convolution, Linear, Operation, Tensors, finish
from halve.errors import EngineError

_NHWC = torch.channels_last
_VECTORS = ("bias", "scale")  # one value in single precision per output channel


class ConvolutionFamily(KernelFamily):
    """A family of kernels for convolutions with bias, residual and activation on NHWC images."""

    device_type = "cuda"
    reads = writes = Layout.NHWC
    max_pixels: ClassVar[int] = (1 << 31) - 1  # of all images together: kernels count them in 32 bits

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        convolution = as_convolution(operation)
        packed = self.pack_weight(tensors["weight"].reshape(convolution.weight_shape), convolution)
        return {**packed, **{name: tensors[name] for name in _VECTORS if name in tensors}}

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        weight = self.unpack_weight(packed, as_convolution(operation))
        weight = weight.flatten(1) if isinstance(operation, Linear) else weight
        return {"weight": weight, **{name: packed[name] for name in _VECTORS if name in packed}}

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        return self._can_count(as_images(inputs, operation)[0], as_convolution(operation))

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        x, convolution = inputs[0], as_convolution(operation)
        if isinstance(operation, Linear):
            if not x.numel():
                return x.new_empty(operation.out_shape(x.shape))  # convolutions need at least one pixel
            y = self._convolve(as_images(inputs, operation), packed, convolution, variant)
            return y.permute(0, 2, 3, 1).reshape(operation.out_shape(x.shape))
        return self._convolve(inputs, packed, convolution, variant)

    def _convolve(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution, variant: str) -> Tensor:
        self._check(inputs, packed, convolution)
        if not len(inputs[0]):
            return self.fake(inputs, packed, convolution)  # an empty batch: nothing to launch
        if inputs[0].is_cuda and self._can_count(inputs[0], convolution):
            return self.launch([readable(x) for x in inputs], packed, convolution, variant)
        return self.reference(inputs, packed, convolution)

    def _can_count(self, x: Tensor, convolution: Convolution) -> bool:
        """Whether neither the images nor their results have too many pixels for the kernel."""
        images, _, height, width = x.shape
        pixels: int = max(height * width, math.prod(convolution.out_size(height, width)))  # of one image
        return images * pixels <= self.max_pixels

    def reference(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution) -> Tensor:
        """The result in plain PyTorch, with bias and scale in single precision as in the kernels."""
        weight, x = self.unpack_weight(packed, convolution), inputs[0]
        geometry = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)
        y = torch.conv2d(x, weight, None, *geometry).float()
        if "bias" in packed:
            y = y + packed["bias"].reshape(1, -1, 1, 1)
        if "scale" in packed:
            y = y * packed["scale"].reshape(1, -1, 1, 1)
        y = y.to(x.dtype)
        return finish(y, inputs[1:], convolution.activation).contiguous(memory_format=_NHWC)

    @abstractmethod
    def pack_weight(self, weight: Tensor, convolution: Convolution) -> dict[str, Tensor]:
        """Pack a weight of shape (rows, channels, height, width)."""

    @abstractmethod
    def unpack_weight(self, packed: Tensors, convolution: Convolution) -> Tensor:
        """Restore the weight."""

    @abstractmethod
    def packed_shapes(self, convolution: Convolution) -> dict[str, tuple[int, ...]]:
        """The shape of each packed tensor except the bias. The first has the dtype of the weight."""

    @abstractmethod
    def launch(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution, variant: str) -> Tensor:
        """Run the kernel on checked arguments: on one GPU, images channels last and aligned to 16 bytes."""

    def _check(self, inputs: Sequence[Tensor], packed: Tensors, convolution: Convolution) -> None:
        """Raise `EngineError` if the kernel would misread the arguments or read out of bounds."""
        x, rows, channels = inputs[0], convolution.rows, convolution.channels * convolution.groups
        if x.dim() != 4 or x.shape[1] != channels:
            raise EngineError(f"the input must have shape (N, {channels}, H, W), got {tuple(x.shape)}")
        shapes = self.packed_shapes(convolution)
        vectors = {name: packed[name] for name in _VECTORS if name in packed}
        named = {**{name: packed[name] for name in shapes}, **vectors}
        for residual in inputs[1:]:
            expected = convolution.out_shape(x.shape)
            if residual.shape != expected:
                raise EngineError(
                    f"the residual must have the shape of the result, {tuple(expected)}, got {tuple(residual.shape)}"
                )
            named["residual"] = residual
        for name, tensor in named.items():
            if tensor.device != x.device:
                raise EngineError(
                    f"the input is on {x.device}, the {name} on {tensor.device}: move the model or the input"
                )
        for name, tensor in (("weight", packed[next(iter(shapes))]), *(("residual", added) for added in inputs[1:])):
            if tensor.dtype != x.dtype:
                raise EngineError(f"the input is {x.dtype}, the {name} {tensor.dtype}: convert the input")
        for name, vector in vectors.items():
            if vector.dtype != torch.float32 or vector.numel() != rows or not vector.is_contiguous():
                raise EngineError(
                    f"the {name} must be a contiguous float32 tensor of {rows} values, "
                    f"got {vector.numel()} in {vector.dtype}"
                )
        if convolution.scaled != ("scale" in packed):
            raise EngineError(
                f"the layer is {'scaled, but has no' if convolution.scaled else 'not scaled, but has a'} scale"
            )
        for name, shape in shapes.items():
            tensor = packed[name]
            if tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise EngineError(
                    f"the {name} of a weight of shape {convolution.weight_shape} must be contiguous with shape "
                    f"{shape}, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
            if name == "metadata" and tensor.dtype != torch.int32:
                raise EngineError(f"the metadata must be int32, got {tensor.dtype}")
            if x.is_cuda:
                check_aligned(name, tensor)


def as_convolution(operation: Operation) -> Convolution:
    assert isinstance(operation, Convolution | Linear)
    return operation.convolution


def check_aligned(name: str, packed: Tensor) -> None:
    """Raise `EngineError` unless packed weights start at a multiple of 16 bytes. Kernels copy that many at once."""
    if offset := packed.data_ptr() % 16:
        raise EngineError(f"the {name} must be aligned to 16 bytes, got an offset of {offset}: use a clone of it")


def readable(x: Tensor) -> Tensor:
    """A channels-last tensor aligned to 16 bytes. Slices may start at any address."""
    x = x.contiguous(memory_format=_NHWC)
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=_NHWC)


def as_images(inputs: Sequence[Tensor], operation: Operation) -> list[Tensor]:
    """The inputs as images, channels last: those of a Linear layer (..., C) have one pixel per row, (1, C, rows, 1)."""
    if isinstance(operation, Linear):
        return [x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2) for x in inputs]
    return list(inputs)
