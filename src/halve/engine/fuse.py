"""Fold BatchNorm into weights, and fuse bias, residual and activation into the layer before them.

Works on the functional graph from `halve.graph.capture`. A convolution or Linear layer absorbs the operations after it
if nothing else reads the values in between. All other operations stay ATen calls.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from halve.engine.layer import Layer
from halve.engine.lower import drop_unused_, get_tensor, replace_
from halve.engine.operations import ACTIVATIONS, Convolution, Linear, MaxPool, PooledConvolution
from halve.graph import Part

_ATEN = torch.ops.aten
_CONVOLUTIONS = (_ATEN.conv2d.default, _ATEN.conv2d.padding)
_NORM = _ATEN._native_batch_norm_legit_no_training.default
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
_TO_IMAGES, _TO_ROWS = [0, 3, 1, 2], [0, 2, 3, 1]
_FIRST_CHANNELS = 4  # a convolution with so few input channels is a first layer
_ACTIVATION_NAMES = {activation.aten: name for name, activation in ACTIVATIONS.items()}


def fuse(part: Part) -> GraphModule:
    """The fused module for inference of a captured part.

    >>> from torch import nn
    >>> from halve.graph import capture
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> module = fuse(capture(net, torch.zeros(2, 3, 8, 8)).parts[0])
    >>> [layer.operation.activation for layer in module.children() if isinstance(layer, Layer)]
    ['relu']
    >>> x = torch.randn(2, 3, 8, 8)
    >>> torch.allclose(module(x), net(x), atol=1e-5)
    True
    """
    module: GraphModule = part.program.module(check_guards=False)
    module.requires_grad_(False)
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is _ATEN._assert_tensor_metadata.default:
            graph.erase_node(node)  # it asserts the dtype of the capture, not the compute dtype
        elif node.target in _VIEWS:
            node.target = _ATEN.reshape.default  # images are channels last now, where `view` fails
        elif node.target is _ATEN.max_pool2d.default and node.args[0].meta["val"].dim() == 4:
            _fuse_pool(module, node, part.module_of(node))
    for node in [node for node in graph.nodes if _is_layer(node)]:
        _Chain(module, node, _layer_name(part, node)).fuse()
    graph.eliminate_dead_code()
    drop_unused_(module)
    module.delete_all_unused_submodules()
    return GraphModule(module, graph).eval()  # exported modules support neither eval() nor copies


def _layer_name(part: Part, node: Node) -> str:
    """The name of the module that owns the layer's weight, even if an outer module runs the operation."""
    caller, weight = part.module_of(node), str(node.args[1].target)  # type: ignore[union-attr]
    holder = ".".join(filter(None, (part.name, weight.rpartition(".")[0])))
    return holder if holder.startswith(f"{caller}.") or not caller else caller


def _fuse_pool(module: GraphModule, node: Node, name: str) -> None:
    given: list[Any] = list(node.args)
    kernel, stride, padding, dilation, ceil_mode = given[1:] + [[], [0, 0], [1, 1], False][len(given) - 2 :]
    pool = MaxPool(_pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation), bool(ceil_mode))
    replace_(module, node, Layer(name, pool, {}, node.meta["val"].dtype), given[:1])


def _is_layer(node: Node) -> bool:
    if node.op != "call_function" or node.target not in (*_CONVOLUTIONS, _ATEN.linear.default):
        return False
    arguments: list[Any] = list(node.args)
    x, weight, *rest = arguments
    bias = rest[0] if rest else node.kwargs.get("bias")
    if not _is_attribute(weight) or not (bias is None or _is_attribute(bias)):
        return False  # the network computes them
    if node.target is _ATEN.linear.default:
        return True
    if x.meta["val"].dim() != 4:
        return False
    if node.target is not _ATEN.conv2d.padding or rest[2] != "same":
        return True
    dilation = rest[3] if len(rest) > 3 else [1, 1]
    spans = [d * (k - 1) for d, k in zip(dilation, weight.meta["val"].shape[2:], strict=True)]
    return all(span % 2 == 0 for span in spans)  # otherwise the padding is asymmetric


def _is_attribute(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


class _Chain:
    """A layer and the operations that it absorbs. The fused layer replaces the last of them."""

    def __init__(self, module: GraphModule, node: Node, name: str) -> None:
        self.module, self.node, self.name = module, node, name
        self.last = node
        self.weight = self._tensor(node.args[1])
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        self.bias = None if bias is None else self._tensor(bias)
        self.scale: Tensor | None = None
        self.residual: Node | None = None
        self.permuted = False  # rows become images behind the layer
        self.operation: Convolution | Linear | PooledConvolution = self._operation()

    def fuse(self) -> None:
        self._absorb(self._norm)
        self._absorb(self._scale)
        if self.scale is None:
            self._absorb(self._addition)
            self._absorb(self._activation)
            self._absorb(self._pooling)
        found = {"weight": self.weight, "bias": self.bias, "scale": self.scale}
        tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
        inputs = [self.node.args[0]] if self.residual is None else [self.node.args[0], self.residual]
        if self.permuted:
            self._permute()
        replace_(self.module, self.last, Layer(self.name, self.operation, tensors), inputs)

    def _permute(self) -> None:
        """Let the readers of the last operation read images, which the layer will give as rows."""
        last, value = self.last, self.last.meta["val"]
        with self.module.graph.inserting_after(last):
            images = self.module.graph.call_function(_ATEN.permute.default, (last, _TO_IMAGES))
        last.replace_all_uses_with(images, delete_user_cb=lambda user: user is not images)
        images.meta, last.meta = dict(last.meta), {**last.meta, "val": value.permute(_TO_ROWS)}

    def _absorb(self, into: Callable[[Node], Node | None]) -> None:
        """Absorb the next operation if it is the only reader of the result so far, and matches."""
        readers = list(self.last.users)
        if len(readers) == 1 and (last := into(readers[0])) is not None:
            self.last = last

    def _norm(self, node: Node) -> Node | None:
        if (
            node.target is not _NORM
            or node.args[0] is not self.last
            or not all(map(_is_attribute, _given(node.args[1:5])))
        ):
            return None
        if isinstance(self.operation, Linear) and len(self.node.meta["val"].shape) != 2:
            return None  # BatchNorm1d over tokens normalises dimension 1, not the last
        outputs = list(node.users)
        if len(outputs) != 1 or outputs[0].target is not operator.getitem or outputs[0].args[1] != 0:
            return None
        arguments: list[Any] = list(node.args)
        gain, shift, mean, variance = (None if a is None else self._tensor(a).double() for a in arguments[1:5])
        assert mean is not None
        assert variance is not None
        factor = (variance + arguments[6]).rsqrt()
        factor = factor if gain is None else factor * gain
        offset = -mean if self.bias is None else self.bias.double() - mean
        offset = offset * factor if shift is None else offset * factor + shift
        rows = factor.reshape(-1, *[1] * (self.weight.dim() - 1))
        self.bias = offset.to(self.weight.dtype)
        self.weight = (self.weight.double() * rows).to(self.weight.dtype)
        return outputs[0]

    def _scale(self, node: Node) -> Node | None:
        """ConvNeXt's layer scale and residual, with the permutation of rows to images before them."""
        if (
            not isinstance(self.operation, Linear)
            or self.last is not self.node
            or node.target is not _ATEN.permute.default
        ):
            return None
        if list(node.args[1]) != _TO_IMAGES or len(node.users) != 1:  # type: ignore[arg-type]
            return None
        [product] = node.users
        if product.target is not _ATEN.mul.Tensor or len(product.users) != 1:
            return None
        factor = product.args[1] if product.args[0] is node else product.args[0]
        if not _is_attribute(factor) or factor is node:
            return None
        scale = self._tensor(factor)
        if scale.numel() != self.operation.rows or scale.shape[-3:] != (self.operation.rows, 1, 1):
            return None
        [total] = product.users
        if total.target is not _ATEN.add.Tensor or total.kwargs.get("alpha", 1) != 1:
            return None
        added = total.args[1] if total.args[0] is product else total.args[0]
        if not isinstance(added, Node) or added is product or added.meta["val"].shape != total.meta["val"].shape:
            return None
        if added.meta["val"].dtype != total.meta["val"].dtype or product.meta["val"].shape != total.meta["val"].shape:
            return None
        with self.module.graph.inserting_before(total):
            self.residual = self.module.graph.call_function(_ATEN.permute.default, (added, _TO_ROWS))
        self.residual.meta["val"] = added.meta["val"].permute(_TO_ROWS)
        self.scale, self.operation, self.permuted = scale.reshape(-1), replace(self.operation, scaled=True), True
        return total

    def _addition(self, node: Node) -> Node | None:
        if node.target is not _ATEN.add.Tensor or node.kwargs.get("alpha", 1) != 1:
            return None
        ours, theirs = node.args if node.args[0] is self.last else node.args[::-1]
        if ours is not self.last or theirs is ours or not isinstance(theirs, Node):
            return None
        value, result = theirs.meta.get("val"), node.meta["val"]
        if not isinstance(value, Tensor) or value.dtype != result.dtype:
            return None
        if value.shape != result.shape or self.last.meta["val"].shape != result.shape:
            return None  # one of the two is broadcast
        self.residual = theirs
        return node

    def _activation(self, node: Node) -> Node | None:
        name = _ACTIVATION_NAMES.get(node.target)
        if name is None or node.kwargs.get("approximate", "none") != "none" or len(node.args) > 1:
            return None
        self.operation = replace(self.operation, activation=name)
        return node

    def _pooling(self, node: Node) -> Node | None:
        layer = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(layer, Layer) or not isinstance(layer.operation, MaxPool):
            return None
        pool, convolution = layer.operation, self.operation
        if not isinstance(convolution, Convolution) or self.residual is not None or convolution.activation != "relu":
            return None
        if convolution.channels > _FIRST_CHANNELS or pool.ceil_mode or pool.dilation != (1, 1):
            return None  # only first layers: others may run sparse, and pooling is cheap beside them
        if convolution.groups != 1 or convolution.dilation != (1, 1):
            return None
        self.operation = PooledConvolution(
            *(convolution.rows, convolution.channels, convolution.kernel, convolution.stride, convolution.padding),
            *(convolution.activation, pool.kernel, pool.stride, pool.padding),
        )
        return node

    def _operation(self) -> Convolution | Linear:
        rows, channels = self.weight.shape[:2]
        if self.node.target is _ATEN.linear.default:
            return Linear(rows, channels)
        defaults: list[Any] = [[1, 1], [0, 0], [1, 1], 1]
        given: list[Any] = list(self.node.args[3:])
        stride, padding, dilation, groups = given + defaults[len(given) :]
        kernel = (self.weight.shape[2], self.weight.shape[3])
        if padding == "same":
            padding = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
        padding = (0, 0) if padding == "valid" else _pair(padding)
        return Convolution(rows, channels, kernel, _pair(stride), padding, _pair(dilation), int(groups))

    def _tensor(self, node: Any) -> Tensor:
        return get_tensor(self.module, str(node.target))


def _given(arguments: Any) -> list[Any]:
    return [argument for argument in arguments if argument is not None]


def _pair(sizes: list[int]) -> tuple[int, int]:
    first, second = sizes * (3 - len(sizes))
    return int(first), int(second)
