"""Find the classifier head: the last Linear or 1x1 convolution whose output is the model's output.

The forward pass is traced symbolically, without example inputs. From each output the graph is followed back through
operations without weights (pooling, flatten, softmax, interpolation and so on). If a model cannot be traced, its last
registered layer is the head, provided it is a Linear or a 1x1 convolution.
"""

import operator
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch.fx
from torch import nn
from torch.nn.parameter import is_lazy

from halve.graph import TRACING_LOCK
from halve.modules import clone, kind_of

_RESHAPING = "flatten view reshape squeeze unsqueeze permute transpose contiguous float mean sum"
_WEIGHTLESS = "softmax log_softmax sigmoid relu dropout interpolate adaptive_avg_pool2d avg_pool2d"
_PASSING = {*_RESHAPING.split(), *_WEIGHTLESS.split()}


def find_heads(model: nn.Module) -> set[str]:
    """Names of the classifier heads: one for each output that ends in one.

    >>> find_heads(nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)))
    {'3'}
    >>> find_heads(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
    set()
    """
    if any(is_lazy(buffer) for buffer in model.buffers()):  # they cannot be copied
        return _last_registered(model)
    copy = clone(model).eval()
    try:
        with TRACING_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the model's own forward, which users have seen before
            graph = _Tracer().trace(copy)
    except Exception:  # tracing runs the model's own code on proxies, which may raise anything
        return _last_registered(copy)
    modules = dict(copy.named_modules())
    results = [node for node in graph.nodes if node.op == "output"]
    return {head for result in results for node in result.all_input_nodes for head in _back_from(node, modules)}


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


def _back_from(node: torch.fx.Node, modules: dict[str, nn.Module]) -> set[str]:
    while True:
        if node.op == "call_module":
            module = modules[str(node.target)]
            if kind_of(module) is not None:
                return {str(node.target)} if _may_be_head(module) else set()
            passing = next(module.parameters(), None) is None
        else:
            passing = node.op in ("call_function", "call_method") and (
                node.target is operator.getitem or getattr(node.target, "__name__", node.target) in _PASSING
            )
        if node.op == "call_function" and node.target in (operator.add, operator.iadd, torch.add):
            branches = [_back_from(source, modules) for source in node.all_input_nodes]
            return set().union(*branches) if all(branches) else set()  # a sum of heads, unless it is a residual
        source: Any = node.args[0] if node.args else None
        if not passing or not isinstance(source, torch.fx.Node):
            return set()
        node = source


def _last_registered(model: nn.Module) -> set[str]:
    weighted = [(n, m) for n, m in model.named_modules() if any(p is not None for p in m._parameters.values())]
    if not weighted or not _may_be_head(weighted[-1][1]):
        return set()
    return {weighted[-1][0]}


def _may_be_head(module: nn.Module) -> bool:
    kind = kind_of(module)
    return kind == "linear" or (kind == "conv" and set(module.kernel_size) == {1})  # type: ignore[arg-type]
