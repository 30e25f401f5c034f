"""Inductor, PyTorch's compiler, for what lies between the layers: normalisations, activations, sums, copies.

Layers on our kernels stay opaque operators. Layers on plain PyTorch are inlined, so that Inductor can fuse them. The
network is compiled for one input shape, with its weights as constants. Compiled code is cached by PyTorch, and is
never part of a saved network.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.engine.kernels import op
from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, family_of
from halve.engine.layer import Layer
from halve.engine.timing import measure
from halve.engine.timing_cache import TimingCache, kernel_id
from halve.errors import EngineError, first_line
from halve.outputs import relative_error

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of outputs, relative to the eager network's; otherwise 1e-3
MAX_SECONDS = 300.0  # of compiling for one network; what begins before is finished
Run = Callable[..., Any]


class Bodies(dict[Any, Run]):
    """Compiled networks by input shape. Copies of a network are not compiled yet."""

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
    run: Run | None = None  # None: eager, with these kernels
    seconds: float = 0.0  # spent on compiling
    failed: str | None = None  # why Inductor could not compile the network


def choose(
    body: GraphModule, inputs: tuple[Tensor, ...], kernels: Mapping[Layer, Kernel], cache: TimingCache, key: str | None
) -> Choice:
    """Time the network as planned against itself compiled by Inductor, and against Inductor with all layers dense.

    Args:
        body: the fused network, whose layers use `kernels`.
        inputs: inputs in the compute dtype.
        kernels: the planned kernel of each layer for these inputs.
        cache: earlier timings.
        key: cache key of the network. Default: do not cache.
    """
    device = inputs[0].device
    dense = dict.fromkeys(kernels, FALLBACK)
    candidates = {"inductor": kernels, "inductor dense": dense} if kernels != dense else {"inductor": kernels}
    described = " ".join(map(kernel_id, kernels.values()))
    ids = {f"{name} {described}": name for name in ("eager", *candidates)}
    known = None if key is None else cache.get(key, ids)
    seconds, runs = 0.0, {}
    if known is None:
        calls: dict[str, Callable[[], Any]] = {"eager": partial(body, *inputs)}
        for name, chosen in candidates.items():
            try:
                runs[name], took = compile_body(body, chosen, inputs)
            except EngineError as error:
                return Choice(kernels, failed=str(error))
            seconds += took
            calls[name] = partial(runs[name], *inputs)
        times = measure(calls, device)
        if key is not None:
            cache.put(key, {one: times[name] for one, name in ids.items()})
            cache.save()
    else:
        times = {ids[one]: ms for one, ms in known.items()}
    best = min(times, key=times.__getitem__)
    if best == "eager":
        return Choice(kernels, seconds=seconds)
    if best not in runs:
        try:
            runs[best], seconds = compile_body(body, candidates[best], inputs)
        except EngineError as error:
            return Choice(kernels, failed=str(error))
    return Choice(candidates[best], runs[best], seconds)


def compile_body(body: GraphModule, kernels: Mapping[Layer, Kernel], inputs: Sequence[Tensor]) -> tuple[Run, float]:
    """Compile a network with one kernel per layer, for inputs of these shapes; also returns the seconds it took.

    Raises `EngineError` if Inductor cannot compile it, or if its outputs differ from those of the eager network.

    Args:
        body: the fused network.
        kernels: the kernel of each layer, whose family the layer must hold. Default: plain PyTorch.
        inputs: inputs in the compute dtype.
    """
    started = time.perf_counter()
    expected = body(*inputs)
    fixed = GraphModule(body, body.graph)
    for name, layer in [*fixed.named_modules()]:
        if isinstance(layer, Layer):
            fixed.set_submodule(name, _Fixed(layer, kernels.get(layer, FALLBACK)))
    fixed.requires_grad_(False).eval()
    # Recordings are ours. Tracing reads whether weights are constants from the global setting.
    options: dict[str, Any] = {"triton.cudagraphs": False, "freezing": True}
    try:
        with _settings(), torch.no_grad():
            run = torch.compile(fixed, dynamic=False, fullgraph=True, options=options)
            outputs = run(*inputs)
    except Exception as error:  # compilers of several kinds: Dynamo, Triton, C++
        raise EngineError(f"Inductor cannot compile the network: {first_line(error)}") from error
    _check(outputs, expected)
    return run, time.perf_counter() - started


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


def _check(outputs: Any, expected: Any) -> None:
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True)
    for got, wanted in pairs:
        if not isinstance(wanted, Tensor) or not wanted.is_floating_point() or not bool(wanted.isfinite().all()):
            continue
        error = relative_error(got, wanted)
        if error > _TOLERANCE.get(wanted.dtype, 1e-3):
            raise EngineError(f"the network compiled by Inductor differs from the eager one by {error:.2g} (relative)")


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
