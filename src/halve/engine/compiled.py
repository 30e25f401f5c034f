"""Compiled networks: modules for inference that replace the model."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.cuda_graphs import autotuned_cudnn
from halve.engine import saved
from halve.engine.capture.guards import Guards
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, family_of, no_sparse_kernels
from halve.engine.layer import Layer
from halve.engine.lower import move_
from halve.engine.plan import Entry, Plan, decide
from halve.engine.recorded import CAPTURE_LOCK, MAX_RECORDINGS, Recordings, Shapes, shapes_of
from halve.engine.saved import SavedNetwork
from halve.engine.timing_cache import TimingCache, network_key
from halve.errors import EngineError, EngineWarning, OptionError, first_line, listed

_NHWC = torch.channels_last
_MAX_SHAPES = 4096  # shapes remembered as valid
CUDA_GRAPH = "CUDA graph"  # its name in `Plan.uncompiled`


class Compiled(nn.Module):
    """A network compiled by `halve.compile`. Call it like the model.

    `plan` says which kernel each layer uses. `warmup` plans more batch sizes and records them as CUDA graphs; other
    batch sizes run without a CUDA graph, on the kernels of the nearest planned size. Outputs are never overwritten by
    later calls.
    """

    def __init__(
        self,
        body: nn.Module,
        example: tuple[Tensor, ...],
        dtype: torch.dtype,
        uncompiled: dict[str, str],
        guards: Guards | None = None,
    ) -> None:
        super().__init__()
        self.training = False
        self.body = body
        self.plan = Plan({}, uncompiled)
        self.guards = guards  # of the graph; None if the network runs eagerly or in parts
        self.dtype, self.input_dtypes = dtype, tuple(x.dtype for x in example)
        self.output_dtype = next((x.dtype for x in example if x.is_floating_point()), dtype)
        self.example = tuple(
            x[:1].detach().clone().cpu() for x in example
        )  # a copy, since the caller may modify theirs
        self.device = example[0].device  # not that of the weights: a graph may have constants on other devices
        self._eager = False
        self._has_layers = any(isinstance(module, Layer) for module in body.modules())
        self._valid: set[Shapes] = set()  # shapes that passed the checks
        self._recordings = Recordings()
        self._sparse_kernels: list[dict[int, Kernel]] = []  # of each layer, before the network fell back to dense
        self._plans: dict[str, tuple[list[dict[int, Kernel]], dict[int, list[Entry]]]] = {}  # of other device types

    @property
    def reason(self) -> str | None:
        """Why every layer runs dense; None if layers can run sparse."""
        return self.plan.dense

    def run_eagerly(self, reason: str) -> None:
        """Do not plan or record anything from now on."""
        self.plan.uncompiled[CUDA_GRAPH], self._eager = f"not recorded: {reason}", True

    @property
    def layers(self) -> list[Layer]:
        """All layers that have a choice of kernels."""
        return [module for module in self.modules() if isinstance(module, Layer)]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if named:
            raise EngineError(f"inputs must be positional, as in the example, got keywords {listed(named)}")
        if torch.compiler.is_compiling():  # devices and dtypes are fixed while tracing
            self._check_shapes(inputs)
            return self._run(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))
        self._check(inputs)
        with torch.no_grad():
            if self.device.type != "cuda":
                return self._run(*inputs)
            recording = self._recordings.of(inputs)
            if recording is not None and not torch.cuda.is_current_stream_capturing():
                return self._recordings.replay(inputs, recording)
            with self._recordings.planning:
                return self._run(*inputs)

    def _run(self, *inputs: Any) -> Any:
        outputs = self.body(*(self.cast_input(x) for x in inputs))
        if self.device.type == "cpu" and self._has_layers:
            outputs = pytree.tree_map_only(Tensor, _without_gaps, outputs)
        if self.output_dtype == self.dtype:
            return outputs
        return pytree.tree_map_only(Tensor, self._cast_output, outputs)

    def cast_input(self, x: Any) -> Any:
        """An input in the dtype and memory format that the layers compute in."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.to(self.dtype, memory_format=_NHWC) if x.dim() == 4 and self._has_layers else x.to(self.dtype)

    def _cast_output(self, y: Tensor) -> Tensor:
        return y.to(self.output_dtype) if y.dtype == self.dtype else y

    def _check(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs) != len(self.input_dtypes):
            raise EngineError(f"the network was compiled for {len(self.input_dtypes)} input(s), got {len(inputs)}")
        for x, dtype, example in zip(inputs, self.input_dtypes, self.example, strict=True):
            if not isinstance(x, Tensor):
                raise EngineError(f"inputs must be tensors, got a {type(x).__name__}")
            if x.device != self.device:
                raise EngineError(f"the input is on {x.device}, the network on {self.device}: move one of them")
            if x.dtype != dtype:
                raise EngineError(f"the input is {x.dtype}, the network was compiled for {dtype}: convert the input")
            if x.dim() != example.dim():
                raise EngineError(
                    f"the input has shape {tuple(x.shape)}, the network was compiled for {_batched(example)}"
                )
        if shapes_of(inputs) not in self._valid:
            self._check_shapes(inputs)
            if len(self._valid) >= _MAX_SHAPES:
                self._valid.clear()
            self._valid.add(shapes_of(inputs))

    def _check_shapes(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise `EngineError` if the graph is not valid for inputs of these shapes."""
        if self.guards is None or (broken := self.guards.broken(inputs)) is None:
            return
        other_size = any(x.shape[1:] != example.shape[1:] for x, example in zip(inputs, self.example, strict=False))
        advice = "compile with any_size=True for other image sizes, or " if other_size else "compile "
        raise EngineError(
            f"the network was compiled for inputs with {broken}, got {', '.join(str(tuple(x.shape)) for x in inputs)}: "
            f"{advice}with an example of that shape"
        )

    def warmup(self, batch_sizes: Sequence[int] | int) -> "Compiled":
        """Plan and record batch sizes ahead of time. Returns self.

        Args:
            batch_sizes: one or more positive integers.
        """
        given = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [batch_sizes]
        for size in given:
            if not isinstance(size, Integral) or size < 1:
                raise OptionError(f"batch_sizes must be positive integers, got {size!r}")
        for size in dict.fromkeys(int(size) for size in given):
            if not self._eager:
                self._prepare(size)
        return self

    def _prepare(self, size: int) -> None:
        inputs = tuple(self._expanded(x, size) for x in self.example)
        self._check(inputs)
        with CAPTURE_LOCK, self._recordings.planning, torch.no_grad(), self._current(), autotuned_cudnn():
            if size not in self.plan.batches:
                with self._unchanged_on_failure():
                    entries = decide(
                        self.layers,
                        partial(self._run, *inputs),
                        TimingCache.of(self.device),
                        self.device,
                        key=network_key(self.body, inputs),
                        sparse=self.reason is None,
                    )
                self.plan.batches |= {size: entries} if entries else {}
            if self.device.type == "cuda":
                self._record(inputs)
            elif self.device.type == "cpu":
                self._run(*inputs)  # CPU kernels are emitted on first use

    def _current(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _expanded(self, x: Tensor, size: int) -> Tensor:
        x = x.to(self.device).expand(size, *x.shape[1:])
        return x.contiguous(memory_format=_NHWC) if x.dim() == 4 else x.contiguous()

    @contextlib.contextmanager
    def _unchanged_on_failure(self) -> Iterator[None]:
        """Restore the kernels of all layers if planning fails, which switches them back and forth."""
        before = [(layer, dict(layer.kernels)) for layer in self.layers]
        try:
            yield
        except BaseException:
            for layer, kernels in before:
                layer.use(kernels)
            raise

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        try:
            dropped = self._recordings.record(self._run, inputs, (*self.body.buffers(), *self.body.parameters()))
            if dropped:
                sizes = ", ".join(str(shapes[0][0]) for shapes in dropped)
                self.plan.uncompiled[CUDA_GRAPH] = f"dropped for batch size {sizes}: at most {MAX_RECORDINGS} are kept"
        except RuntimeError as error:  # the network may do something that cannot be recorded
            self.plan.uncompiled.setdefault(CUDA_GRAPH, f"not recorded: {first_line(error)}")
            torch.cuda.synchronize()

    def train(self, mode: bool = True) -> "Compiled":
        """Do nothing: compiled networks are for inference only."""
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> "Compiled":
        moved = args[0](torch.empty(0, dtype=self.dtype, device=self.device))
        if moved.dtype != self.dtype:
            raise EngineError(
                f"the network was compiled to compute in {self.dtype}: compile the model again with dtype={moved.dtype}"
            )
        self._recordings = Recordings()  # they hold the addresses of the old weights
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if moved.device != self.device:
            move_(self.body, self.device, moved.device)
            old, self.device = self.device, moved.device
            self._adapt(no_sparse_kernels(old, self.dtype))
            known = old.type != self.device.type and self.device.type in self._plans
            if self.reason is None and (known or not self.runs_here()) and not self.switch_plan(old):
                message = (
                    f"running dense: the plan was made for {old.type}, call warmup() to plan for {self.device.type}"
                )
                warnings.warn(message, EngineWarning, stacklevel=2)
        return self

    def runs_here(self) -> bool:
        """Whether the kernels of all layers run on this type of device."""
        kernels = {(kernel, layer.dtype) for layer in self.layers for kernel in layer.kernels.values()}
        return all(family_of(kernel).unavailable(self.device, dtype) is None for kernel, dtype in kernels)

    def switch_plan(self, old: torch.device) -> bool:
        """Use the plan that was made for this type of device. Runs dense and returns False if there is none."""
        self._plans[old.type] = [dict(layer.kernels) for layer in self.layers], dict(self.plan.batches)
        kernels, self.plan.batches = self._plans.get(self.device.type, ([{1: FALLBACK}] * len(self.layers), {}))
        for layer, chosen in zip(self.layers, kernels, strict=True):
            layer.use(chosen)
        return bool(self.plan.batches)

    def _adapt(self, before: str | None) -> None:
        """Switch to dense or back to sparse on a new device. `before` is why the old device could not run sparse."""
        now = no_sparse_kernels(self.device, self.dtype)
        if now is not None and self.reason is None:
            self.fall_back(now)
        elif before is not None and self.reason is not None:
            self.plan.dense = now
            if now is None and self._sparse_kernels:  # none if it was loaded from a file of a device without them
                for layer, kernels in zip(self.layers, self._sparse_kernels, strict=True):
                    layer.use(kernels)

    def use_plan_of(self, other: "Compiled") -> None:
        """Copy the plan of another network with the same layers."""
        if [(a.name, a.operation) for a in self.layers] != [(b.name, b.operation) for b in other.layers]:
            raise EngineError("plan_from= has other layers than this network: compile without plan_from=")
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if not mine.is_2_4 and any(family_of(kernel).sparse for kernel in theirs.kernels.values()):
                raise EngineError(f"layer {mine.name} is 2:4 in plan_from= but not here: use the same masks")
            mine.use(theirs.kernels)
        self.plan = Plan({size: list(table) for size, table in other.plan.batches.items()}, dict(self.plan.uncompiled))

    def save(self, path: str | Path) -> None:
        """Save the network with its plan and packed weights. `halve.load_compiled` loads it."""
        if not isinstance(self.body, GraphModule) or self.guards is None:
            raise EngineError(
                "the network runs code outside of its graph and cannot be saved: compile the model again, "
                "timings are cached"
            )
        inputs = tuple(self.cast_input(torch.cat([x, x])) for x in self.example)
        network = SavedNetwork(self.body, self.example, self.dtype, self.guards, self.device, self.plan)
        saved.write(path, network, inputs)

    def fall_back(self, reason: str) -> "Compiled":
        """Switch all layers to dense kernels, with a warning."""
        self.plan.dense = reason
        self._sparse_kernels = [dict(layer.kernels) for layer in self.layers]
        for layer in self.layers:
            layer.use({1: FALLBACK})
        warnings.warn(f"running dense: {reason}", EngineWarning, stacklevel=3)
        return self


def load(path: str | Path, device: str | torch.device | None = None) -> Compiled:
    """Load a compiled network from a file written by `Compiled.save`.

    Args:
        path: the file. Only load files that you trust.
        device: where to run. Default: the type of device it was saved from, or the CPU if there is none.

    >>> import halve, tempfile, warnings
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    >>> images = torch.randn(2, 4, 8, 8)
    >>> with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
    ...     fast = halve.compile(model, halve.prune(model), images)
    ...     fast.save(f"{folder}/net.pt2")
    ...     again = halve.load_compiled(f"{folder}/net.pt2")
    >>> torch.equal(again(images), fast(images))
    True
    """
    network = saved.read(path)
    fast = Compiled(network.body, network.example, network.dtype, network.plan.uncompiled, network.guards)
    fast.plan = network.plan
    if device is None:
        device = network.device if network.device.type != "cuda" or torch.cuda.is_available() else "cpu"
    fast, sizes = fast.to(device), list(network.plan.batches)
    reason = no_sparse_kernels(fast.device, fast.dtype)
    if fast.reason is None and reason is not None:
        fast.fall_back(reason)
    elif not fast.runs_here():
        fast.switch_plan(network.device)
    return fast.warmup(sizes)


def _without_gaps(y: Tensor) -> Tensor:
    """An output in a usual memory format. Layers may leave space between the channels of their outputs."""
    usual = y.is_contiguous() or (y.dim() == 4 and y.is_contiguous(memory_format=_NHWC))
    return y if usual else y.contiguous()


def _batched(example: Tensor) -> str:
    return f"({', '.join(map(str, ('N', *example.shape[1:])))})"
