"""Inductor, PyTorch's compiler, for what lies between the layers: normalisations, activations, sums, copies.

Layers on our kernels stay opaque operators. Layers on plain PyTorch are inlined, so that Inductor can fuse them. The
network is compiled for one input shape, with its weights as constants. Compiled code is cached by PyTorch, and is
never part of a saved network.
"""

import contextlib
import copy
import math
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.engine.chains import with_chains
from halve.engine.kernels import op
from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, family_of
from halve.engine.layer import Layer
from halve.engine.plan import Entry
from halve.engine.timing import measure
from halve.engine.timing_cache import TimingCache, kernel_id
from halve.engine.visit import visit
from halve.errors import EngineError, first_line
from halve.outputs import relative_error

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of outputs, relative to the eager network's; otherwise 1e-3
MAX_SECONDS = 300.0  # of compiling for one network; what begins before is finished
LEAST_SHARE = 0.03  # of the network's time between its layers: for less, Inductor is not tried
LIBRARY_SHARE = 0.7  # of the time of dense layers that Inductor needs at least: it fuses activations. Measured: 0.77
_SENSITIVITY = 4  # times what a network makes of a rounding error: what its outputs may differ by in any case
_LARGEST_ERROR = 0.5  # however sensitive a network is: outputs that are all zero differ by 1
Run = Callable[..., Any]


class CompiledBody:
    """A network that Inductor compiled for inputs of one shape and memory format.

    Dynamo checks all modules and weights on each call, which takes longer than many layers. Here they are constants, so
    calls on the CPU run the code of Inductor itself, with nothing in between. Whatever else Dynamo would compile for
    again goes through its checks: another number of threads, autocast, subclasses of tensors.
    """

    def __init__(self, checked: Run, code: "_Code | None" = None, module: nn.Module | None = None) -> None:
        """Make it callable.

        Args:
            checked: the network as Dynamo calls it.
            code: what Inductor made of it. Default: always go through Dynamo's checks.
            module: owns the weights. Default: none.
        """
        self._checked, self._code, self.module = checked, code, module
        self._threads = torch.get_num_threads()

    def __call__(self, *inputs: Tensor) -> Any:
        if self._code is not None and self._as_compiled(inputs):
            return self._code(inputs)
        with torch.inference_mode(False), torch.no_grad():  # Dynamo compiles again for tensors of inference mode
            return self._checked(*(x.clone() if x.is_inference() else x for x in inputs))

    def _as_compiled(self, inputs: tuple[Tensor, ...]) -> bool:
        plain = all(type(x) is Tensor and not x.is_neg() for x in inputs)
        return plain and torch.get_num_threads() == self._threads and not torch.is_autocast_enabled("cpu")


class _Code:
    """What Inductor made of the one graph of a network: a function of its inputs and weights, without their names.

    Which of its arguments are the inputs, and which of its results is which output, is known from the first call. An
    output may also be one of the inputs.
    """

    def __init__(self, function: Run, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        self._function, self._arguments, self._results = function, list(arguments), list(results)

    def bind(self, inputs: tuple[Tensor, ...], outputs: Any) -> bool:
        """Learn from the first call; returns whether that is enough to call the function."""
        leaves, self._structure = pytree.tree_flatten(outputs)
        self._inputs = [_place(x, self._arguments) for x in inputs]
        self._outputs = [_place(y, [*self._results, *inputs]) for y in leaves]
        self._is_only_result = isinstance(outputs, Tensor) and len(self._results) == 1 and self._outputs == [0]
        self._results.clear()
        for place in filter(lambda place: place >= 0, self._inputs):
            self._arguments[place] = None
        tensors = all(x is None or isinstance(x, Tensor) for x in self._arguments)
        return tensors and -1 not in (*self._inputs, *self._outputs)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        arguments = self._arguments.copy()
        for place, x in zip(self._inputs, inputs, strict=True):
            arguments[place] = x
        results = self._function(*arguments)
        if self._is_only_result:
            return results[0]
        available = [*results, *inputs]
        return pytree.tree_unflatten([available[place] for place in self._outputs], self._structure)


def _place(tensor: Any, among: Sequence[Any]) -> int:
    """Where a tensor is; -1 if it is not there."""
    return next((place for place, other in enumerate(among) if other is tensor), -1)


class Bodies(dict[Any, Run]):
    """Forms of a network by input shape: layers joined, or compiled. Copies of a network have none yet."""

    def tensors(self) -> list[Tensor]:
        """The tensors of all forms, which they may share with the network."""
        modules = (form if isinstance(form, nn.Module) else getattr(form, "module", None) for form in self.values())
        return [x for module in modules if module is not None for x in (*module.parameters(), *module.buffers())]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bodies":
        return Bodies()

    def __reduce__(self) -> Any:
        return Bodies, ()


def by_default(device: torch.device) -> bool:
    """Whether Inductor is tried on a device if nobody says so."""
    return device.type in ("cuda", "cpu")


def unavailable(device: torch.device) -> str | None:
    """Why Inductor cannot compile for a device; None if it can."""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers if name):
        return "Inductor needs a C++ compiler on CPUs, and there is no g++ or clang++; the rest runs eagerly"
    return None


@dataclass(frozen=True)
class Choice:
    """The fastest form of a network for one input shape."""

    kernels: Mapping[Layer, Kernel]
    run: CompiledBody | None = None  # None: eager, with these kernels
    seconds: float = 0.0  # spent on compiling
    failed: str | None = None  # why Inductor could not compile the network as planned


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of all layers together, each timed alone: on the planned kernels, and on the fastest of libraries.

    Layers that have only one kernel are not timed, and count as 0. `dense_ms` only counts layers with weights: Inductor
    has other kernels for pooling.
    """

    planned_ms: float
    dense_ms: float

    def hopeless(self, network_ms: float) -> set[str]:
        """The forms that cannot be faster than `network_ms`, so that minutes of compiling are saved.

        Inductor only speeds up what lies between the layers. If all layers are dense, they alone take most of
        `dense_ms`: what follows a convolution there may be fused with the next operations instead.

        >>> LayerTime(planned_ms=0.99, dense_ms=1.7).hopeless(network_ms=1.0) == {"inductor", "inductor dense"}
        True
        >>> LayerTime(planned_ms=0.6, dense_ms=0.7).hopeless(network_ms=1.0)
        set()
        """
        found = set()
        if network_ms - self.planned_ms < LEAST_SHARE * network_ms:
            found.add("inductor")
        if LIBRARY_SHARE * self.dense_ms > network_ms:
            found.add("inductor dense")
        return found


def choose(
    body: GraphModule,
    inputs: tuple[Tensor, ...],
    kernels: Mapping[Layer, Kernel],
    cache: TimingCache,
    key: str | None,
    layers: LayerTime | None = None,
) -> Choice:
    """Time the network as planned against itself compiled by Inductor, and against Inductor with all layers dense.

    Args:
        body: the fused network, whose layers use `kernels`.
        inputs: inputs in the compute dtype.
        kernels: the planned kernel of each layer for these inputs.
        cache: earlier timings.
        key: cache key of the network. Default: do not cache.
        layers: how long the layers alone take. Forms that cannot be faster by that are not compiled. Default: unknown.
    """
    device = inputs[0].device
    dense = dict.fromkeys(kernels, FALLBACK)
    candidates = {"inductor": kernels, "inductor dense": dense} if kernels != dense else {"inductor": kernels}
    described = jit.digest(*map(kernel_id, kernels.values()))
    ids = {f"{name} {described}": name for name in ("eager", *candidates)}
    known = None if key is None else cache.get(key, ids)
    seconds, runs, failed = 0.0, {}, None
    if known is None:
        calls: dict[str, Callable[[], Any]] = {"eager": partial(body, *inputs)}
        excluded = set()
        for name, chosen in candidates.items():
            if layers is not None and name in layers.hopeless(min(measure(calls, device).values())):
                excluded.add(name)
                continue
            started = time.perf_counter()
            try:
                runs[name], took = compile_body(body, chosen, inputs)
                calls[name] = partial(runs[name], *inputs)
            except EngineError as error:
                failed, took = failed or str(error), time.perf_counter() - started
                excluded.add(name)
            seconds += took
        times = dict.fromkeys(excluded, math.inf) | measure(calls, device)
        if key is not None and failed is None:
            cache.put(key, {one: times[name] for one, name in ids.items()})
            cache.save()
    else:
        times = {ids[one]: ms for one, ms in known.items()}
    best = min(times, key=times.__getitem__)
    if best == "eager":
        return Choice(kernels, seconds=seconds, failed=failed)
    if best not in runs:
        try:
            runs[best], seconds = compile_body(body, candidates[best], inputs)
        except EngineError as error:
            return Choice(kernels, failed=str(error))
    return Choice(candidates[best], runs[best], seconds, failed)


def all_dense(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of a plan after the network turned out to be fastest with all layers dense, compiled by Inductor."""
    reason = "the network is fastest dense, compiled by Inductor"
    return [replace(e, kernel=str(FALLBACK), sparse=False, time_ms=None, reason=reason) for e in entries]


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
    compiled: list[_Code | None] = []

    def backend(graph: GraphModule, examples: Sequence[Any]) -> Run:
        from torch._inductor.compile_fx import compile_fx

        function: Run = compile_fx(graph, examples, config_patches=options)  # type: ignore[assignment]

        def run(*arguments: Any) -> Any:
            results = function(*arguments)
            if not compiled:
                compiled.append(_Code(function, arguments, results))
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

    folder = "TORCHINDUCTOR_CACHE_DIR"
    chosen = os.environ.get(folder)
    os.environ[folder] = chosen or str(jit.cache_dir() / "inductor")
    try:
        with config.patch(freezing=True):
            yield
    finally:
        if chosen is None:
            del os.environ[folder]
