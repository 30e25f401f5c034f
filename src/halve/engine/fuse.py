"""A captured network with BatchNorm folded into weights, and bias, residual and activation fused into the layer.

Works on the graph of ATen operations: a convolution or Linear layer takes in what follows it as long as nobody else
reads the values in between, and nothing that it reads is written to meanwhile. Whatever is not understood stays as it
was.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from halve.engine import ops
from halve.engine.capture.alias import origin, writes_between, written
from halve.graph import Part

_ATEN = torch.ops.aten
_CONVOLUTIONS = (_ATEN.conv2d.default, _ATEN.conv2d.padding)
_ADDITIONS = (_ATEN.add.Tensor, _ATEN.add_.Tensor)
_ACTIVATIONS: dict[Any, str] = {
    _ATEN.relu.default: "relu",
    _ATEN.relu_.default: "relu",
    _ATEN.gelu.default: "gelu",
    _ATEN.silu.default: "silu",
    _ATEN.silu_.default: "silu",
    _ATEN.hardswish.default: "hardswish",
    _ATEN.hardswish_.default: "hardswish",
}
_IDLE = tuple(  # unless they are told to train
    getattr(_ATEN, name).default
    for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for name in (kind, f"{kind}_")
)
_ASSERTIONS = (_ATEN._assert_tensor_metadata.default,)  # of the type that was captured, not of the one computed in


@dataclass(frozen=True)
class Fused:
    """What one layer took in."""

    layer: str
    norm: bool
    residual: bool
    activation: str


def fuse(part: Part) -> tuple[GraphModule, list[Fused]]:
    """The part as a module of its own with its layers fused, and what each layer took in. For inference alone.

    >>> from torch import nn
    >>> from halve.graph import capture
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> module, layers = fuse(capture(net, torch.zeros(2, 3, 8, 8)).parts[0])
    >>> layers
    [Fused(layer='0', norm=True, residual=False, activation='relu')]
    >>> x = torch.randn(2, 3, 8, 8)
    >>> torch.allclose(module(x), net(x), atol=1e-5)
    True
    """
    module: GraphModule = part.program.module(check_guards=False)
    module.requires_grad_(False)
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in _IDLE and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _ASSERTIONS:
            graph.erase_node(node)
        elif node.target is _ATEN.view.default:
            node.target = _ATEN.reshape.default  # what was contiguous lies channels last now
        elif node.target is _ATEN.max_pool2d.default and not node.kwargs and node.args[0].meta["val"].dim() == 4:
            _pool(node)
    changing = {origin(value) for node in graph.nodes for value in written(node)}
    layers = []
    nodes = [node for node in graph.nodes if _is_layer(node) and not changing.intersection(node.all_input_nodes[1:])]
    for number, node in enumerate(nodes):
        layers.append(_Layer(module, node, _name(part, node), number).fuse())
    graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    return GraphModule(module, graph).eval(), layers  # anew: what export gives refuses eval() and copies


def _name(part: Part, node: Node) -> str:
    """The module that holds a layer's weight, where the operation stands in the code of one around it."""
    caller, weight = part.module_of(node), str(node.args[1].target)  # type: ignore[union-attr]
    holder = ".".join(filter(None, (part.name, weight.rpartition(".")[0])))
    return holder if holder.startswith(f"{caller}.") or not caller else caller


def _pool(node: Node) -> None:
    """Put the engine's own pooling in its place."""
    given: list[Any] = list(node.args)
    kernel, stride, padding, dilation, ceil_mode = given[1:] + [[], [0, 0], [1, 1], False][len(given) - 2 :]
    sizes = (list(size) * (3 - len(size)) for size in (kernel, stride or kernel, padding, dilation))  # one for both
    with node.graph.inserting_before(node):
        new = node.graph.call_function(ops.max_pool2d._opoverload, (given[0], *sizes, ceil_mode))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _is_layer(node: Node) -> bool:
    if node.op != "call_function" or node.target not in (*_CONVOLUTIONS, _ATEN.linear.default):
        return False
    arguments: list[Any] = list(node.args)
    x, weight, *rest = arguments
    if not _held(weight) or (node.target is not _ATEN.linear.default and x.meta["val"].dim() != 4):
        return False
    if node.target is not _ATEN.conv2d.padding or rest[2] != "same":
        return True
    dilation = rest[3] if len(rest) > 3 else [1, 1]
    spans = [d * (k - 1) for d, k in zip(dilation, weight.meta["val"].shape[2:], strict=True)]
    return all(span % 2 == 0 for span in spans)  # otherwise one side gets more than the other


def _held(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


class _Layer:
    """One layer and the chain of operations that it takes in; the fused one takes the place of the last."""

    def __init__(self, module: GraphModule, node: Node, name: str, number: int) -> None:
        self.module, self.node, self.name, self.number = module, node, name, number
        self.chain = [node]
        self.weight = self._tensor(node.args[1])
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        self.bias = self._tensor(bias)
        self.computed_bias = bias is not None and self.bias is None
        self.residual: Node | None = None
        self.activation = "none"

    @property
    def last(self) -> Node:
        return self.chain[-1]

    def fuse(self) -> Fused:
        assert self.weight is not None
        norm = not self.computed_bias and self._take(self._norm)
        added = self._take(self._addition)
        self._take(self._activation)
        self._replace()
        return Fused(self.name, norm, added, self.activation)

    def _take(self, into: Callable[[Node], bool]) -> bool:
        """Let the layer take in the one operation that reads it so far, if it can."""
        readers = list(self.last.users)
        if len(readers) != 1:
            return False
        read = {*self.node.all_input_nodes, *([] if self.residual is None else [self.residual])}
        if writes_between(self.last, readers[0], read) or not into(readers[0]):
            return False  # the fused layer stands where the reader stood, and would read what was written
        self.chain.append(readers[0])
        return True

    def _norm(self, node: Node) -> bool:
        if node.target is not _ATEN.batch_norm.default or node.args[0] is not self.last or node.args[5] is not False:
            return False
        if self.node.target is _ATEN.linear.default and len(self.node.meta["val"].shape) != 2:
            return False  # BatchNorm1d over tokens normalises along dimension 1, not the last
        gain, shift, mean, variance = (self._tensor(argument) for argument in node.args[1:5])
        if any(isinstance(argument, Node) and not _held(argument) for argument in node.args[1:5]):
            return False  # computed along the way
        if mean is None or variance is None or self.weight is None:
            return False
        factor = (variance.double() + float(node.args[7])).rsqrt()  # type: ignore[arg-type]
        factor = factor if gain is None else factor * gain.double()
        offset = -mean.double() if self.bias is None else self.bias.double() - mean.double()
        offset = offset * factor if shift is None else offset * factor + shift.double()
        rows = factor.reshape(-1, *[1] * (self.weight.dim() - 1))
        self.bias = offset.to(self.weight.dtype)
        self.weight = (self.weight.double() * rows).to(self.weight.dtype)
        return True

    def _addition(self, node: Node) -> bool:
        if node.target not in _ADDITIONS or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            return False
        ours, theirs = node.args if node.args[0] is self.last else node.args[::-1]
        if ours is not self.last or theirs is ours or not isinstance(theirs, Node):
            return False
        value = theirs.meta.get("val")
        if (
            not isinstance(value, Tensor)
            or value.shape != node.meta["val"].shape
            or value.dtype != self.last.meta["val"].dtype
        ):
            return False
        own = theirs.op == "call_function" and origin(theirs) is theirs and len(theirs.users) == 1
        if theirs in written(node) and not own:
            return False  # others would see the sum in what they read
        self.residual = theirs
        return True

    def _activation(self, node: Node) -> bool:
        name = _ACTIVATIONS.get(node.target)
        if name is None or node.kwargs.get("approximate", "none") != "none" or len(node.args) > 1:
            return False
        self.activation = name
        return True

    def _replace(self) -> None:
        graph = self.module.graph
        with graph.inserting_before(self.last):
            assert self.weight is not None
            weight = self._stored("weight", self.weight)
            bias = self.node.args[2] if self.computed_bias else None
            if self.bias is not None:
                bias = self._stored("bias", self.bias)
            common = (self.node.args[0], weight, bias, self.residual)
            if self.node.target is _ATEN.linear.default:
                new = graph.call_function(ops.linear._opoverload, (*common, self.activation))
            else:
                stride, padding, dilation, groups = self._geometry()
                arguments = (*common, stride, padding, dilation, groups, self.activation)
                new = graph.call_function(ops.conv2d._opoverload, arguments)
        new.meta = {**self.last.meta, "layer": self.name}
        self.last.replace_all_uses_with(new)
        for node in reversed(self.chain):
            graph.erase_node(node)

    def _geometry(self) -> tuple[list[int], list[int], list[int], int]:
        assert self.weight is not None
        defaults: list[Any] = [[1, 1], [0, 0], [1, 1], 1]
        given: list[Any] = list(self.node.args[3:])
        stride, padding, dilation, groups = given + defaults[len(given) :]
        if padding == "same":
            padding = [d * (k - 1) // 2 for d, k in zip(dilation, self.weight.shape[2:], strict=True)]
        return list(stride), [0, 0] if padding == "valid" else list(padding), list(dilation), int(groups)

    def _tensor(self, node: Any) -> Tensor | None:
        if not _held(node):
            return None
        value: Any = self.module
        for part in node.target.split("."):
            value = getattr(value, part)
        tensor: Tensor = value.detach()
        return tensor

    def _stored(self, kind: str, value: Tensor) -> Node:
        name = f"layer{self.number}_{kind}"
        self.module.register_buffer(name, value)
        node = self.module.graph.get_attr(name)
        node.meta["val"] = value
        return node
