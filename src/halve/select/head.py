"""Find the heads of a model: the layers whose outputs are the model's outputs, such as class scores and boxes.

The forward pass is traced symbolically, without example inputs. From each output the graph is followed back through
operations without weights (pooling, flatten, softmax, interpolation and so on) to a Linear or a 1x1 convolution.

Detectors cannot be traced. Their largest traceable modules can, and a layer at the end of one of them is a head if no
module that is registered after it reads as many channels as the layer returns. The same holds for modules that only run
in training, such as auxiliary classifiers.
"""

import itertools
import math
import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.fx
from torch import nn
from torch.nn.parameter import is_lazy

from halve.graph import TRACING_LOCK
from halve.modules import clone, kind_of

_RESHAPING = "flatten view reshape squeeze unsqueeze permute transpose contiguous float mean sum"
_WEIGHTLESS = "softmax log_softmax sigmoid relu dropout interpolate adaptive_avg_pool2d avg_pool2d"
_PASSING = {*_RESHAPING.split(), *_WEIGHTLESS.split()}


class _Part(NamedTuple):
    """A module that was traced, or a layer, and the layers at its end."""

    name: str
    ends: set[str]


def find_heads(model: nn.Module) -> set[str]:
    """Names of the heads: one or more for each output that ends in one.

    >>> find_heads(nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)))
    {'3'}
    >>> find_heads(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
    set()
    """
    if any(is_lazy(buffer) for buffer in model.buffers()):  # cannot be copied, and so not traced
        copy, parts = model, [_Part(name, {name}) for name, module in model.named_modules() if kind_of(module)]
    else:
        copy = clone(model).eval()
        with TRACING_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the model's own forward, which users have seen before
            parts = list(_parts("", copy))
    heads = set()
    for part in parts:
        heads |= {end for end in part.ends if not part.name or not _is_read(copy, end, part)}
    # Several layers are the classes and boxes of a detector. A single one with a large kernel returns features.
    return heads if len(heads) > 1 else {head for head in heads if _is_small(copy.get_submodule(head))}


def _parts(name: str, module: nn.Module) -> Iterator[_Part]:
    """The largest modules that can be traced. Modules that do not run in them are parts of their own."""
    if name and kind_of(module) is not None:
        yield _Part(name, {name})
        return
    try:
        graph = _Tracer().trace(module)
    except Exception:  # tracing runs the model's own code on proxies, which may raise anything
        ran = set()
    else:
        modules = dict(module.named_modules())
        ends = _ends(graph, modules, _is_small if not name else lambda layer: True)
        yield _Part(name, {_join(name, end) for end in ends})
        ran = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    for path, child in _not_run("", module, ran):
        yield from _parts(_join(name, path), child)


def _not_run(name: str, module: nn.Module, ran: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules inside a module of which nothing ran, in the order of registration."""
    for child_name, child in module.named_children():
        path = _join(name, child_name)
        if path in ran or not any(kind_of(inner) for inner in child.modules()):
            continue
        if any(other.startswith(f"{path}.") for other in ran):
            yield from _not_run(path, child, ran)
        else:
            yield path, child


class _Tracer(torch.fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:  # the patched nn.Module also runs other threads' models
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.DataParallel):  # of torch.nn, but the user's modules are inside
            return False
        return kind_of(m) is not None or super().is_leaf_module(m, module_qualified_name)


def _ends(graph: torch.fx.Graph, modules: dict[str, nn.Module], accepts: Callable[[nn.Module], bool]) -> set[str]:
    """The accepted layers that the outputs of a graph end in."""
    results = [node for node in graph.nodes if node.op == "output"]
    return {end for result in results for node in result.all_input_nodes for end in _back_from(node, modules, accepts)}


def _back_from(node: torch.fx.Node, modules: dict[str, nn.Module], accepts: Callable[[nn.Module], bool]) -> set[str]:
    while True:
        if node.op == "call_module":
            module = modules[str(node.target)]
            if kind_of(module) is not None:
                return {str(node.target)} if accepts(module) else set()
            passing = next(module.parameters(), None) is None
        else:
            passing = node.op in ("call_function", "call_method") and (
                node.target is operator.getitem or getattr(node.target, "__name__", node.target) in _PASSING
            )
        if node.op == "call_function" and node.target in (operator.add, operator.iadd, torch.add):
            branches = [_back_from(source, modules, accepts) for source in node.all_input_nodes]
            return set().union(*branches) if all(branches) else set()  # a sum of heads, unless it is a residual
        source: Any = node.args[0] if node.args else None
        if not passing or not isinstance(source, torch.fx.Node):
            return set()
        node = source


def _is_read(model: nn.Module, end: str, part: _Part) -> bool:
    """Whether a module that is registered after the layer, outside of its part, may read the layer's output."""
    layer, parent = model.get_submodule(end), end.rpartition(".")[0]
    later = itertools.dropwhile(lambda named: named[0] != end, model.named_modules())
    return any(
        _may_read(module, layer, name.rpartition(".")[0] == parent)
        for name, module in later
        if not f"{name}.".startswith(f"{part.name}.")
    )


def _may_read(module: nn.Module, layer: nn.Module, siblings: bool) -> bool:
    """Whether a module may read the output of a layer, by the number of channels."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(is_lazy(parameter) for parameter in own):
        return True
    written = int(getattr(layer, "out_channels", 0) or getattr(layer, "out_features", 0))
    kind = kind_of(module)
    if kind is None:
        return any(written in parameter.shape for parameter in own)
    read = int(getattr(module, "in_channels", 0) or getattr(module, "in_features", 0))
    if kind == "linear" and not _is_small(layer) and written:
        return read % written == 0 and math.isqrt(read // written) ** 2 == read // written  # flattened square images
    return written == read or (siblings and written in (2 * read, 3 * read))  # split, as queries, keys and values are


def _is_small(layer: nn.Module) -> bool:
    """Whether the layer is a Linear or a 1x1 convolution."""
    kind = kind_of(layer)
    return kind == "linear" or (kind == "conv" and set(layer.kernel_size) == {1})  # type: ignore[arg-type]


def _join(*names: str) -> str:
    return ".".join(filter(None, names))
