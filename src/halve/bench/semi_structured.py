"""torch's own 2:4 (`torch.sparse.to_sparse_semi_structured`) in a compiled network: a peer to be measured against.

It has products of matrices alone. Linear layers and 1x1 convolutions of stride 1 run on it, others as they did.
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


class Product(nn.Module):
    """A `Layer` as a product with a semi-structured matrix; BatchNorm and bias stay inside, the activation follows."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layer: Layer, transposed: bool) -> None:
        super().__init__()
        tensors, self.operation = layer.tensors(), layer.operation
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prototype, as it says
            matrix: Any = torch.sparse.to_sparse_semi_structured(tensors["weight"].flatten(1).contiguous())
        matrix.fuse_transpose_cusparselt = transposed  # the product is written channels last at once
        self.matrix, self.linear = matrix, isinstance(layer.operation, Linear)
        self.register_buffer("packed", matrix.packed)  # counted as its weight
        bias = tensors.get("bias")
        self.register_buffer("bias", None if bias is None else bias.to(layer.dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        pixels = x if self.linear else x.permute(0, 2, 3, 1)
        added = [] if residual is None else [residual if self.linear else residual.permute(0, 2, 3, 1)]
        y = F.linear(pixels.reshape(-1, pixels.shape[-1]), self.matrix, self.bias)
        assert isinstance(self.operation, Convolution | Linear)
        y = finish(y.reshape(*pixels.shape[:-1], -1), added, self.operation.activation)
        return y if self.linear else y.permute(0, 3, 1, 2)


def put_in_(fast: Compiled, inputs: tuple[Tensor, ...]) -> str:
    """Run what can be run on it, each layer tried on the input that it gets. Says how many, and why not the others.

    Raises `EngineError` when none can.
    """
    products: dict[int, Product] = {}
    reasons: dict[str, str] = {}

    def try_layer(layer: Layer, args: tuple[Any, ...]) -> None:
        operation = layer.operation
        if not layer.is_2_4 or not isinstance(operation, Convolution | Linear) or not operation.pointwise:
            return
        if id(layer) in products:
            return
        for transposed in (True, False):
            try:
                product = Product(layer, transposed)
                product(*args)
                torch.cuda.synchronize()
            except Exception as error:  # whatever a library has against this shape
                reasons[layer.name] = first_line(error)
                continue
            products[id(layer)] = product
            reasons.pop(layer.name, None)
            return

    layers = fast.layers
    handles = [layer.register_forward_pre_hook(try_layer) for layer in layers]
    try:
        fast(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    why = "".join(f"; not {name}: {reason}" for name, reason in reasons.items())
    if not products:
        raise EngineError(f"no 2:4 layer is a Linear or a 1x1 convolution of stride 1 that it can run{why}")
    for name, module in list(fast.named_modules()):
        if id(module) in products:
            fast.set_submodule(name, products[id(module)])
    return f"{len(products)} of {len(layers)} layers on it, others as in best_dense: it has no convolution{why}"
