"""A network that was compiled: a module for inference that takes the place of the model."""

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
from torch.fx.node import map_aggregate

from halve.cuda_graphs import autotuned_cudnn
from halve.engine.capture.guards import Guards, misfit
from halve.engine.kernels.cuda import driver, jit
from halve.engine.layer import DENSE, Layer
from halve.engine.plan import Plan, decide
from halve.engine.recorded import ALONE, MOST, Recordings, Shapes, shapes_of
from halve.engine.timing_cache import Memory
from halve.errors import EngineError, EngineWarning, listed
from halve.graph import Sizes

_NHWC = torch.channels_last
_MOST_SHAPES = 4096  # that are remembered as fitting


class Compiled(nn.Module):
    """What `halve.compile` gives: call it like the model.

    `plan` says which layer runs how. `warmup` plans and records further batch sizes; a call with another one takes the
    nearest plan, without a recording. Outputs are the caller's own. It has no gradients.
    """

    def __init__(
        self,
        body: nn.Module,
        example: tuple[Tensor, ...],
        dtype: torch.dtype,
        left: dict[str, str],
    ) -> None:
        super().__init__()
        self.training = False
        self.body = body
        self.plan = Plan({}, left)
        self.dtype, self.input_dtypes = dtype, tuple(x.dtype for x in example)
        self.output_dtype = next((x.dtype for x in example if x.is_floating_point()), dtype)
        self.example = tuple(x[:1].detach().clone().cpu() for x in example)  # our own: the caller's may change
        self.sizes: Sizes = ()
        self.guards: Guards | None = None
        self._as_it_is = False
        self._ours = any(isinstance(module, Layer) for module in body.modules())  # which want images channels last
        self._fitting: set[Shapes] = set()  # shapes that were looked at
        self._recordings = Recordings()
        self._elsewhere: list[dict[int, str]] = []  # how layers ran before the network came to run dense
        self.device = example[0].device  # a graph may hold constants that lie elsewhere

    @property
    def reason(self) -> str | None:
        """Why nothing runs sparse; None where something can."""
        return self.plan.dense

    def run_as_it_is(self, reason: str) -> None:
        """Plan and record nothing."""
        self.plan.left["CUDA graph"], self._as_it_is = f"not recorded: {reason}", True

    def hold_for(self, sizes: Sizes, guards: Guards) -> None:
        """Refuse inputs of shapes that the graph does not hold for."""
        self.sizes, self.guards = sizes, guards

    @property
    def layers(self) -> list[Layer]:
        """The layers that can run in several ways."""
        return [module for module in self.modules() if isinstance(module, Layer)]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if named:
            raise EngineError(f"inputs are taken by place, as in the example, not by name: {listed(named)}")
        if torch.compiler.is_compiling():  # devices and types stand fast then
            self.check_sizes(inputs)
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
        outputs = self.body(*(self.entering(x) for x in inputs))
        if self.output_dtype == self.dtype:
            return outputs
        return pytree.tree_map_only(Tensor, self._leaving, outputs)

    def entering(self, x: Any) -> Any:
        """An input as the layers take it."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.to(self.dtype, memory_format=_NHWC) if x.dim() == 4 and self._ours else x.to(self.dtype)

    def _leaving(self, y: Tensor) -> Tensor:
        return y.to(self.output_dtype) if y.dtype == self.dtype else y

    def _check(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs) != len(self.input_dtypes):
            raise EngineError(f"the network was compiled for {len(self.input_dtypes)} input(s), not {len(inputs)}")
        for x, dtype, example in zip(inputs, self.input_dtypes, self.example, strict=True):
            if not isinstance(x, Tensor):
                raise EngineError(f"an input is a {type(x).__name__}, the network was compiled for a tensor")
            if x.device != self.device:
                raise EngineError(f"the input is on {x.device}, the network on {self.device}: move one of them")
            if x.dtype != dtype:
                raise EngineError(f"the input is {x.dtype}, the network was compiled for {dtype}: convert the input")
            if x.dim() != example.dim():
                raise EngineError(f"the input has shape {tuple(x.shape)}, the example had {('N', *example.shape[1:])}")
        if shapes_of(inputs) not in self._fitting:
            self.check_sizes(inputs)
            if len(self._fitting) >= _MOST_SHAPES:
                self._fitting.clear()
            self._fitting.add(shapes_of(inputs))

    def check_sizes(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise where the graph does not hold for inputs of these shapes."""
        for x, limits in zip(inputs, self.sizes, strict=False):
            if why := misfit(x, limits):
                raise EngineError(f"the input has {why}: compile it again with an example of that shape")
        if self.guards is not None and (broken := self.guards.broken(inputs)):
            raise EngineError(
                f"the network was captured for inputs with {broken}, not {[tuple(x.shape) for x in inputs]}: "
                f"compile it again with an example of that shape"
            )

    def warmup(self, batch_sizes: Sequence[int] | int) -> "Compiled":
        """Plan and record these batch sizes, or this one, so that no call has to. Does nothing without a GPU."""
        given = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [batch_sizes]
        for size in given:
            if not isinstance(size, Integral) or size < 1:
                raise EngineError(f"batch sizes are whole numbers from 1 on, not {size!r}")
        if self.device.type != "cuda" or self._as_it_is:
            return self
        for size in dict.fromkeys(int(size) for size in given):
            inputs = tuple(self._varied(x, size) for x in self.example)
            self._check(inputs)
            with ALONE, self._recordings.planning, torch.no_grad(), torch.cuda.device(self.device), autotuned_cudnn():
                if size not in self.plan.batches:
                    with self._as_before_if_it_fails():
                        run = partial(self._run, *inputs)
                        entries = decide(self.layers, run, Memory.of(self.device), sparse=self.reason is None)
                    self.plan.batches |= {size: entries} if entries else {}
                self._record(inputs)
        return self

    def _varied(self, x: Tensor, size: int) -> Tensor:
        x = x.to(self.device).expand(size, *x.shape[1:])
        return x.contiguous(memory_format=_NHWC) if x.dim() == 4 else x.contiguous()

    @contextlib.contextmanager
    def _as_before_if_it_fails(self) -> Iterator[None]:
        """Planning puts layers into ways by turns: where it breaks off, memory for one, none may be left in one."""
        before = [(layer, dict(layer.ways)) for layer in self.layers]
        try:
            yield
        except BaseException:
            for layer, ways in before:
                layer.take(ways)
            raise

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        try:
            gone = self._recordings.record(self._run, inputs, (*self.body.buffers(), *self.body.parameters()))
            if gone:
                sizes = ", ".join(str(shapes[0][0]) for shapes in gone)
                self.plan.left["CUDA graph"] = f"of {sizes} images was given up: {MOST} are kept"
        except RuntimeError as error:  # a part of the network may do what cannot be recorded
            first = (str(error).splitlines() or [""])[0]
            self.plan.left.setdefault("CUDA graph", f"not recorded: {first[:120]}")
            torch.cuda.synchronize()

    def train(self, mode: bool = True) -> "Compiled":
        """A compiled network is for inference: it has no other mode."""
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> "Compiled":
        moved = args[0](torch.empty(0, dtype=self.dtype, device=self.device))
        if moved.dtype != self.dtype:
            raise EngineError(
                f"the network was compiled to compute in {self.dtype}: compile the model again with dtype={moved.dtype}"
            )
        self._recordings = Recordings()  # they hold the addresses of weights that move now
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if moved.device != self.device:
            move_(self.body, self.device, moved.device)
            before, self.device = missing(self.device, self.dtype), moved.device
            self._settle(before)
        return self

    def _settle(self, before: str | None) -> None:
        """On a new device: dense where it must be, sparse again where only the device `before` stood against it."""
        now = missing(self.device, self.dtype)
        if now is not None and self.reason is None:
            self.fall_back(now)
        elif before is not None and self.reason is not None:
            self.plan.dense = now
            if now is None:
                for layer, ways in zip(self.layers, self._elsewhere, strict=True):
                    layer.take(ways)

    def take_plan_of(self, other: "Compiled") -> None:
        """Run each layer as another network of the same structure does."""
        if [(a.name, a.geometry) for a in self.layers] != [(b.name, b.geometry) for b in other.layers]:
            raise EngineError("plan_from= is a network of other layers: compile this one on its own")
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if not mine.halved and any(way.startswith("sparse") for way in theirs.ways.values()):
                raise EngineError(f"layer {mine.name} is 2:4 in plan_from= and not here: masks must be the same")
            mine.take(theirs.ways)
        self.plan = Plan({size: list(table) for size, table in other.plan.batches.items()}, dict(self.plan.left))

    def save(self, path: str | Path) -> None:
        """Write it to a file, plan and packed weights; `halve.load_compiled` reads it."""
        from halve.engine.saved import save  # which makes such networks, and so cannot be above

        save(self, path)

    def fall_back(self, reason: str) -> "Compiled":
        """Run dense; say so, once."""
        self.plan.dense = reason
        self._elsewhere = [dict(layer.ways) for layer in self.layers]
        for layer in self.layers:
            layer.take({1: DENSE})
        warnings.warn(f"running dense: {reason}", EngineWarning, stacklevel=3)
        return self


def move_(body: nn.Module, old: torch.device, new: torch.device) -> None:
    """What graphs make along the way, such as positions, is made on the new device."""

    def moved(value: Any) -> Any:
        return new if isinstance(value, torch.device) and value.type == old.type else value

    for module in body.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
            module.recompile()


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing can run sparse there; None where it can."""
    if (why := driver.missing(device)) is not None:
        return why
    if dtype not in (torch.float16, torch.bfloat16):
        return f"sparse tensor cores multiply float16 and bfloat16, not {dtype}: pass dtype=torch.float16"
    return jit.available()
