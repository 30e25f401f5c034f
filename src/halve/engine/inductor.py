"""Inductor, PyTorch's compiler, for what lies between the layers: normalisations, activations, sums, copies.

Layers on our kernels stay opaque operators. Layers on plain PyTorch are inlined, so that Inductor can fuse them. The
network is compiled for one input shape, with its weights as constants. Compiled code is cached by PyTorch, and is
never part of a saved network.
"""

import contextlib
import copy
import importlib
import logging
import math
import os
import shutil
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.engine.chains import with_chains
from halve.engine.compiled_body import CompiledBody, CompiledCode, Run
from halve.engine.kernels import op
from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, family_of
from halve.engine.layer import Layer
from halve.engine.visit import visit
from halve.errors import EngineError, first_line
from halve.outputs import relative_error

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of outputs, relative to the eager network's; otherwise 1e-3
_SENSITIVITY = 4  # times what a network makes of a rounding error: what its outputs may differ by in any case
_LARGEST_ERROR = 0.5  # however sensitive a network is: outputs that are all zero differ by 1


def by_default(device: torch.device) -> bool:
    """Whether Inductor is tried on a device if nobody says so."""
    return device.type in ("cuda", "cpu")


def unavailable(device: torch.device) -> str | None:
    """Why Inductor cannot compile for a device; None if it can."""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers if name):
        return "Inductor needs a C++ compiler on CPUs, and there is no g++ or clang++; the rest runs eagerly"
    return None


def load() -> None:
    """Import the parts of PyTorch that Inductor imports when it first compiles, without a line that says nothing.

    Where there is a CUDA toolkit and no GPU, one of them logs "No CUDA runtime is found, using CUDA_HOME=...".
    """
    logger = logging.getLogger("torch.utils.cpp_extension")

    def other(record: logging.LogRecord) -> bool:
        return "No CUDA runtime is found" not in record.getMessage()

    logger.addFilter(other)
    try:
        with contextlib.suppress(ImportError):  # Inductor says what is missing, if it needs it
            importlib.import_module("torch.utils.cpp_extension")
    finally:
        logger.removeFilter(other)


def compile_body(
    body: GraphModule, kernels: Mapping[Layer, Kernel], inputs: Sequence[Tensor]
) -> tuple[CompiledBody, float]:
    """Compile a network with one kernel per layer, for inputs of these shapes; also returns the seconds it took.

    Raises `EngineError` if Inductor cannot compile it, or if its outputs differ from those of the eager network.

    Args:
        body: the fused network.
        kernels: the kernel of each layer, whose family the layer must hold. Default: plain PyTorch.
        inputs: inputs in the compute dtype.
    """
    started = time.perf_counter()
    shapes: dict[Layer, tuple[int, ...]] = {}
    layers = [layer for layer in body.modules() if isinstance(layer, Layer)]

    def note(layer: Layer, given: list[Tensor]) -> None:
        shapes.setdefault(layer, tuple(given[0].shape))

    expected = visit(layers, partial(body, *inputs), note)
    fixed = with_chains(body, kernels, shapes)
    fixed = GraphModule(fixed, copy.deepcopy(fixed.graph))  # its layers are replaced; a graph holds its module
    for name, layer in [*fixed.named_modules()]:
        if isinstance(layer, Layer):
            fixed.set_submodule(name, _Fixed(layer, kernels.get(layer, FALLBACK)))
    fixed.requires_grad_(False).eval()
    # Recordings are ours. Tracing reads whether weights are constants from the global setting.
    options: dict[str, Any] = {"triton.cudagraphs": False, "freezing": True}
    compiled: list[CompiledCode | None] = []

    def backend(graph: GraphModule, examples: Sequence[Any]) -> Run:
        from torch._inductor.compile_fx import compile_fx

        function: Run = compile_fx(graph, examples, config_patches=options)  # type: ignore[assignment]

        def run(*arguments: Any) -> Any:
            results = function(*arguments)
            if not compiled:
                compiled.append(CompiledCode(function, arguments, results))
            return results

        return run

    before = _generated_modules()
    try:
        with _settings(), torch.no_grad():
            run = torch.compile(fixed, dynamic=False, fullgraph=True, backend=backend)
            outputs = run(*inputs)
    except Exception as error:  # compilers of several kinds: Dynamo, Triton, C++
        raise EngineError(f"Inductor cannot compile the network: {first_line(error)}") from error
    _check(outputs, expected, body, inputs)
    code = compiled[0] if compiled else None
    compiled[:] = [None]  # Dynamo holds backends forever, and this one holds the list
    direct = code is not None and code.bind(tuple(inputs), outputs) and all(x.is_cpu for x in inputs)
    found = CompiledBody(run, code if direct else None, fixed)
    made = [module for name, module in _generated_modules().items() if name not in before]
    weakref.finalize(found, _forget, made)
    return found, time.perf_counter() - started


def _generated_modules() -> dict[int, ModuleType]:
    """The modules that Inductor has generated and holds, by their id. Frozen weights are their attributes.

    Other versions of PyTorch may hold them elsewhere: none are found then, and none forgotten.
    """
    from torch._inductor.codecache import PyCodeCache

    shared = {id(module) for module in getattr(PyCodeCache, "modules_no_attr", {}).values()}
    return {id(module): module for module in getattr(PyCodeCache, "modules", []) if id(module) not in shared}


def _forget(modules: Sequence[ModuleType]) -> None:
    """Make Inductor forget modules of a network that is gone, as it would hold their weights forever."""
    from torch._inductor.codecache import PyCodeCache

    if not modules:
        return
    gone = {id(module) for module in modules}
    PyCodeCache.modules[:] = [module for module in PyCodeCache.modules if id(module) not in gone]
    for module in modules:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]


class _Fixed(nn.Module):
    """A layer with one kernel."""

    def __init__(self, layer: Layer, kernel: Kernel) -> None:
        super().__init__()
        self.operation, self.described, self.kernel = layer.operation, layer.operation.to_json(), kernel
        self.dtype = layer.dtype if layer.has_weight else None
        self.inlined = family_of(kernel).inlined(kernel.variant)
        tensors = layer.tensors() if self.inlined else layer.packed(kernel.family)
        self.names = tuple(tensors)
        for name, tensor in tensors.items():  # on CPUs Inductor packs weights itself, and better from this layout
            self.register_buffer(name, tensor.contiguous() if self.inlined and tensor.is_cpu else tensor)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        inputs = [x] if residual is None else [x, residual]
        if self.dtype is not None:
            inputs = [value.to(self.dtype) for value in inputs]
        tensors = {name: self.get_buffer(name) for name in self.names}
        if self.inlined:
            return self.operation.reference(inputs, tensors)
        return op.call(inputs, tensors, self.described, self.kernel)


def _check(outputs: Any, expected: Any, body: GraphModule, inputs: Sequence[Tensor]) -> None:
    """Raise `EngineError` if outputs differ from the eager network's by more than rounding."""
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True)
    sensitivity: list[float] | None = None
    for place, (got, wanted) in enumerate(pairs):
        if not isinstance(wanted, Tensor) or not wanted.is_floating_point() or not bool(wanted.isfinite().all()):
            continue
        error = relative_error(got, wanted)
        if error <= _TOLERANCE.get(wanted.dtype, 1e-3):
            continue
        sensitivity = sensitivity or _sensitivity(body, inputs, expected)
        if error > min(_SENSITIVITY * sensitivity[place], _LARGEST_ERROR):
            raise EngineError(f"the network compiled by Inductor differs from the eager one by {error:.2g} (relative)")


def _sensitivity(body: GraphModule, inputs: Sequence[Tensor], expected: Any) -> list[float]:
    """How far each output moves if the inputs move by a rounding error: deep networks may amplify it.

    Zero for outputs of which that cannot be said: they overflow, or all of them are zero.
    """

    def nudged(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        signs = torch.ones(x.numel(), dtype=x.dtype, device=x.device)
        signs[::2] = -1
        return x.clone().mul_(1 + torch.finfo(x.dtype).eps * signs.reshape(x.shape))  # with the strides of x

    with torch.no_grad():
        moved = body(*map(nudged, inputs))
    pairs = zip(pytree.tree_leaves(moved), pytree.tree_leaves(expected), strict=True)
    found = [relative_error(got, wanted) if isinstance(wanted, Tensor) else 0.0 for got, wanted in pairs]
    return [error if math.isfinite(error) else 0.0 for error in found]


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Weights are constants, and compiled code is cached next to our kernels unless the user has chosen a folder."""
    import torch._inductor.config as config  # loads Inductor, which takes a second

    load()
    folder = "TORCHINDUCTOR_CACHE_DIR"
    chosen = os.environ.get(folder)
    os.environ[folder] = chosen or str(jit.cache_dir() / "inductor")
    try:
        with config.patch(freezing=True):
            yield
    finally:
        if chosen is None:
            del os.environ[folder]
