"""PyTorch's own 2:4 (`torch.sparse.to_sparse_semi_structured`) in a compiled network, to compare against.

It only has matrix products: Linear layers and 1x1 convolutions of stride 1 use it, other layers keep their kernels.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.engine.compiled import Compiled
from halve.engine.layer import Layer
from halve.engine.operations import Convolution, Linear, finish
from halve.errors import EngineError, first_line


class SemiStructuredLayer(nn.Module):
    """A `Layer` whose weight is a semi-structured matrix. The bias is fused; residual and activation are not."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layer: Layer, transposed: bool) -> None:
        super().__init__()
        tensors, self.operation = layer.tensors(), layer.operation
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that it is a prototype
            matrix: Any = torch.sparse.to_sparse_semi_structured(tensors["weight"].flatten(1).contiguous())
        matrix.fuse_transpose_cusparselt = transposed  # cuSPARSELt writes the product transposed, already channels last
        self.matrix, self.linear = matrix, isinstance(layer.operation, Linear)
        self.register_buffer("packed", matrix.packed)  # so that it counts towards the weights
        bias = tensors.get("bias")
        self.register_buffer("bias", None if bias is None else bias.to(layer.dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        pixels = x if self.linear else x.permute(0, 2, 3, 1)
        added = [] if residual is None else [residual if self.linear else residual.permute(0, 2, 3, 1)]
        y = F.linear(pixels.reshape(-1, pixels.shape[-1]), self.matrix, self.bias)
        assert isinstance(self.operation, Convolution | Linear)
        y = finish(y.reshape(*pixels.shape[:-1], -1), added, self.operation.activation)
        return y if self.linear else y.permute(0, 3, 1, 2)


def replace_layers_(fast: Compiled, inputs: tuple[Tensor, ...]) -> str:
    """Run 2:4 layers on PyTorch's semi-structured matrices where possible; returns a note on how many, and why not all.

    Each layer is tried on its actual input. Raises `EngineError` if no layer can be replaced.
    """
    replaced: dict[int, SemiStructuredLayer] = {}
    reasons: dict[str, str] = {}

    def try_layer(layer: Layer, args: tuple[Any, ...]) -> None:
        operation = layer.operation
        if not layer.is_2_4 or not isinstance(operation, Convolution | Linear) or not operation.pointwise:
            return
        if id(layer) in replaced:
            return
        for transposed in (True, False):
            try:
                candidate = SemiStructuredLayer(layer, transposed)
                candidate(*args)
                torch.cuda.synchronize()
            except Exception as error:  # libraries refuse shapes with all kinds of errors
                reasons[layer.name] = first_line(error)
                continue
            replaced[id(layer)] = candidate
            reasons.pop(layer.name, None)
            return

    layers = fast.layers
    handles = [layer.register_forward_pre_hook(try_layer) for layer in layers]
    try:
        fast(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    why = "".join(f"; {name} failed: {reason}" for name, reason in reasons.items())
    if not replaced:
        raise EngineError(
            f"needs a 2:4 Linear layer or 1x1 convolution of stride 1 that PyTorch can run, found none{why}"
        )
    for name, module in list(fast.named_modules()):
        if id(module) in replaced:
            fast.set_submodule(name, replaced[id(module)])
    return f"{len(replaced)} of {len(layers)} layers semi-structured, the others as in best_dense: no convolutions{why}"
