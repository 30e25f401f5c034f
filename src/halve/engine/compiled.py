"""Compiled networks: modules for inference that replace the model."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from halve.batches import Images, Progress
from halve.cuda_graphs import autotuned_cudnn
from halve.engine.bodies import Bodies
from halve.engine.capture.guards import Guards
from halve.engine.capture.partial import around_parts
from halve.engine.decide import decide
from halve.engine.inductor import by_default, compile_body, unavailable
from halve.engine.inductor_choice import MAX_SECONDS, Choice, LayerTime, all_dense, choose
from halve.engine.join import (
    Join,
    choose_joins,
    joined_entries,
    joined_form,
    joined_kernels,
    planned_joins,
    separated_entries,
)
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, FAMILIES, family_of, no_sparse_kernels
from halve.engine.layer import Layer
from halve.engine.lower import move_
from halve.engine.operations import PooledConvolution
from halve.engine.plan import Entry, Plan
from halve.engine.recorded import CAPTURE_LOCK, MAX_RECORDINGS, Recordings, Shapes, shapes_of
from halve.engine.saved import file
from halve.engine.saved.file import SavedNetwork
from halve.engine.shared_lock import SharedLock
from halve.engine.timing_cache import TimingCache, network_key
from halve.engine.visit import visit
from halve.errors import EngineError, EngineWarning, OptionError, first_line, listed, warn
from halve.process_state import preserved_process_state

_NHWC = torch.channels_last
_MAX_SHAPES = 4096  # shapes remembered as valid
# Their names in `Plan.uncompiled`.
CUDA_GRAPH, INDUCTOR, JOINS, SPARSE = "CUDA graph", "Inductor", "joined layers", "sparse kernels"


class Compiled(nn.Module):
    """A network compiled by `halve.compile`. Call it like the model.

    `plan` says which kernel each layer uses. `warmup` plans more batch sizes and records them as CUDA graphs; other
    batch sizes run without a CUDA graph, on the kernels of the nearest planned size. Outputs are never overwritten by
    later calls.
    """

    def __init__(
        self,
        body: nn.Module,
        example: tuple[Images, ...],
        dtype: torch.dtype,
        uncompiled: dict[str, str],
        guards: Guards | None = None,
        inductor: bool | None = None,
    ) -> None:
        super().__init__()
        self.training = False
        self.body = body
        self.plan = Plan({}, uncompiled)
        self.guards = guards  # of the graph; None if the network runs eagerly or in parts
        first = [x if isinstance(x, Tensor) else x[0] for x in example]
        self.dtype, self.input_dtypes = dtype, tuple(x.dtype for x in first)
        self.output_dtype = next((x.dtype for x in first if x.is_floating_point()), dtype)
        self.example = tuple(_one_image(x) for x in example)
        self.device = first[0].device  # not that of the weights: a graph may have constants on other devices
        self._takes_lists = any(isinstance(x, list) for x in example)  # of images of any sizes
        self._around = around_parts(dtype)  # what the code between the parts of such a network computes in
        self.inductor = by_default(self.device) if inductor is None else inductor
        self._bodies = Bodies()  # with layers joined, or compiled by Inductor
        self._compiling_seconds = 0.0  # that Inductor has taken, also for what is not used
        self._eager = False
        self._planar = _planar_inputs(body, len(example))
        self._has_layers = any(isinstance(module, Layer) for module in body.modules())
        self._valid: set[Shapes] = set()  # shapes that passed the checks
        self._recordings = Recordings()
        self._planning = SharedLock()  # calls share it: layers switch kernels while one thread plans
        self._sparse_kernels: list[dict[int, Kernel]] = []  # of each layer, before the network fell back to dense

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

    def tensors(self) -> list[Tensor]:
        """All weights in memory: also those of joined layers, and of what Inductor compiled. Some share storage."""
        return [*self.parameters(), *self.buffers(), *self._bodies.tensors()]

    @property
    def code_bytes(self) -> int:
        """The size of the machine code of all layers on this CPU; 0 on GPUs. Code that layers share counts once.

        Code that has not been emitted yet is emitted now.
        """
        codes = {id(code): code.size for layer in self.layers for code in layer.emitted()}
        return sum(codes.values())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if named:
            raise EngineError(f"inputs must be positional, as in the example, got keywords {listed(named)}")
        if torch.compiler.is_compiling():  # devices and dtypes are fixed while tracing
            self._check_shapes(inputs)
            return self._run(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))
        self._check(inputs)
        with torch.no_grad():
            if self.device.type != "cuda":
                with self._planning.shared():
                    return self._run(*inputs)
            recording = None if self._takes_lists else self._recordings.of(inputs)
            if recording is not None and not torch.cuda.is_current_stream_capturing():
                return self._recordings.replay(inputs, recording)
            with self._recordings.planning:
                return self._run(*inputs)

    def _run(self, *inputs: Any) -> Any:
        given = self._cast(inputs)
        compiled = None
        if self._bodies and not torch.compiler.is_compiling():
            compiled = self._bodies.get(shapes_of(inputs))
        outputs = self.body(*given) if compiled is None else compiled(*self._as_compiled(given))
        if self.device.type == "cpu" and self._has_layers:
            outputs = (
                _without_gaps(outputs)
                if type(outputs) is Tensor
                else pytree.tree_map_only(Tensor, _without_gaps, outputs)
            )
        if self.output_dtype == (self._around if self._takes_lists else self.dtype):
            return outputs
        return pytree.tree_map_only(Tensor, self._cast_output, outputs)

    def _cast(self, inputs: Iterable[Any]) -> list[Any]:
        """Inputs in the dtype and memory format that the layers compute in."""
        return [self.cast_input(x, planar) for x, planar in zip(inputs, self._planar, strict=True)]

    def _as_compiled(self, inputs: Iterable[Any]) -> list[Any]:
        """Inputs with the strides that Inductor compiles for."""

        def strided(x: Any, planar: bool) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.contiguous(memory_format=_NHWC) if x.dim() == 4 and not (x.is_cpu or planar) else x.contiguous()

        return [strided(x, planar) for x, planar in zip(inputs, self._planar, strict=True)]

    def cast_input(self, x: Any, planar: bool = False) -> Any:
        """An input in the dtype and memory format that the layers compute in."""
        if isinstance(x, tuple | list):
            floating = all(image.is_floating_point() for image in x)
            dtype = self._around if floating else None
            return [image.to(dtype=dtype, copy=True) for image in x]  # the network's own code may write to them
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if x.dim() != 4 or not self._has_layers or planar or x.is_cpu:  # CPU kernels read pixels of a channel in a row
            return x.to(self.dtype)
        return x.to(self.dtype, memory_format=_NHWC)

    def _cast_output(self, y: Tensor) -> Tensor:
        return y.to(self.output_dtype) if y.dtype in (self.dtype, self._around) else y

    def _check(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs) != len(self.input_dtypes):
            raise EngineError(f"the network was compiled for {len(self.input_dtypes)} input(s), got {len(inputs)}")
        for x, dtype, example in zip(inputs, self.input_dtypes, self.example, strict=True):
            if isinstance(example, list) and (not isinstance(x, tuple | list) or not x):
                raise EngineError(f"the network was compiled for a list of images, got a {type(x).__name__}")
            for one in x if isinstance(example, list) else [x]:
                self._check_tensor(one, dtype, example[0] if isinstance(example, list) else example)
        if self.guards is not None and shapes_of(inputs) not in self._valid:
            self._check_shapes(inputs)
            if len(self._valid) >= _MAX_SHAPES:
                self._valid.clear()
            self._valid.add(shapes_of(inputs))

    def _check_tensor(self, x: Any, dtype: torch.dtype, example: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise EngineError(f"inputs must be tensors, got a {type(x).__name__}")
        if x.device != self.device:
            raise EngineError(f"the input is on {x.device}, the network on {self.device}: move one of them")
        if x.dtype != dtype:
            raise EngineError(f"the input is {x.dtype}, the network was compiled for {dtype}: convert the input")
        if x.dim() != example.dim():
            raise EngineError(f"the input has shape {tuple(x.shape)}, the network was compiled for {_batched(example)}")

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

    @preserved_process_state()
    @torch.inference_mode(False)  # packed weights would be read-only outside of it
    def warmup(self, batch_sizes: Sequence[int] | int, progress: Progress = True) -> "Compiled":
        """Plan and record batch sizes ahead of time. Returns self.

        Args:
            batch_sizes: one or more positive integers.
            progress: show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
        """
        given = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [batch_sizes]
        for size in given:
            if not isinstance(size, Integral) or size < 1:
                raise OptionError(f"batch_sizes must be positive integers, got {size!r}")
        for size in dict.fromkeys(int(size) for size in given):
            if not self._eager:
                self._prepare(size, progress)
        return self

    def _prepare(self, size: int, progress: Progress) -> None:
        inputs = tuple(self._expanded(size))
        self._check(inputs)
        planning = CAPTURE_LOCK, self._recordings.planning, self._planning.alone()
        with contextlib.ExitStack() as held, torch.no_grad(), self._current(), autotuned_cudnn():
            for lock in planning:
                held.enter_context(lock)
            if size not in self.plan.batches and size not in self.plan.inductor:
                with self._unchanged_on_failure():
                    entries = decide(
                        self.layers,
                        partial(self._run, *inputs),
                        TimingCache.of(self.device),
                        self.device,
                        key=network_key(self.body, inputs),
                        sparse=self.reason is None,
                        progress=progress,
                    )
                # New dicts, as other threads may print or copy the plan.
                self.plan.batches = self.plan.batches | ({size: entries} if entries else {})
                self._choose_form(size, inputs)
            elif self._has_form(size) and shapes_of(inputs) not in self._bodies:
                self._choose_form(size, inputs, planned=True)
            if self.device.type == "cuda" and self._takes_lists:
                reason = "not recorded: lists of images may have any sizes"
                self.plan.uncompiled = {**self.plan.uncompiled, CUDA_GRAPH: reason}
            elif self.device.type == "cuda":
                self._record(inputs)
            elif self.device.type == "cpu":
                self._run(*inputs)
                self.plan.code_bytes = self.code_bytes

    def _has_form(self, size: int) -> bool:
        """Whether the plan has a form of the network for this batch size."""
        return size in self.plan.inductor or size in self.plan.joins

    def _choose_form(self, size: int, inputs: tuple[Tensor, ...], planned: bool = False) -> None:
        """Join layers, and let Inductor compile what lies between them, if that is faster, or if the plan says so.

        What is chosen only holds for this input shape.
        """
        if not isinstance(self.body, GraphModule):
            return
        sizes = self._layer_sizes(inputs)
        kernels = {layer: layer.kernel_for(layer_size) for layer, layer_size in sizes.items()}
        entries, body, used = self.plan.batches.get(size, []), self.body, kernels
        if planned:
            wanted = self.plan.joins.get(size, [])
            joins = planned_joins(body, wanted, sizes, self.device)
            if len(joins) < len(wanted):
                self._lose_joins(size, joins, kernels)
        else:
            joins = [] if self.reason is not None else self.faster_joins(inputs, entries)
        if joins:
            body, used = self.join(inputs, joins), joined_kernels(kernels, joins)
        compiled = self._compiled(size, body, used, inputs, planned, self._layer_time(entries, joins))
        if compiled is None or compiled.run is None:
            self.plan.inductor = {other: took for other, took in self.plan.inductor.items() if other != size}
        else:
            self._bodies[shapes_of(inputs)] = compiled.run
            self.plan.inductor = {**self.plan.inductor, size: compiled.seconds}
            if compiled.kernels != used:  # all dense
                entries, joins = all_dense(entries), []
                for layer, layer_size in sizes.items():
                    layer.use({**layer.kernels, layer_size: FALLBACK})
        if planned:
            return
        if entries:
            self.plan.batches = {**self.plan.batches, size: joined_entries(entries, joins)}
        if joins:
            self.plan.joins = {**self.plan.joins, size: [join.planned for join in joins]}

    def _lose_joins(self, size: int, found: Sequence[Join], kernels: Mapping[Layer, Kernel]) -> None:
        """Correct the plan if it has joins that this network or device cannot have: their layers run separately."""
        wanted = self.plan.joins[size]
        if size in self.plan.batches:  # new dicts, as other threads may print or copy the plan
            entries = separated_entries(self.plan.batches[size], wanted, kernels)
            self.plan.batches = {**self.plan.batches, size: joined_entries(entries, found)}
        others = {other: joins for other, joins in self.plan.joins.items() if other != size}
        self.plan.joins = {**others, size: [join.planned for join in found]} if found else others
        lost = f"{len(wanted) - len(found)} of {len(wanted)} not used at batch size {size}: no kernel here"
        self._note(JOINS, lost)
        warn(f"slower than planned: {JOINS}: {lost}. Compile the model here to plan again", EngineWarning)

    def _layer_sizes(self, inputs: tuple[Tensor, ...]) -> dict[Layer, int]:
        """The input size of each layer that runs on these inputs."""
        sizes: dict[Layer, int] = {}

        def note(layer: Layer, layer_inputs: list[Tensor]) -> None:
            sizes.setdefault(layer, layer.operation.size(layer_inputs[0]))

        visit(self.layers, partial(self.body, *self._given(inputs)), note)
        return {layer: sizes[layer] for layer in self.layers if layer in sizes}

    def _given(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs as a compiled network gets them."""
        return tuple(self._as_compiled(self._cast(inputs)))

    def faster_joins(self, inputs: tuple[Tensor, ...], entries: Sequence[Entry], sparse: bool = True) -> list[Join]:
        """The layers that are faster joined, on inputs of these shapes. `entries` has the times of their kernels."""
        if not isinstance(self.body, GraphModule):
            return []
        kernels = {layer: layer.kernel_for(size) for layer, size in self._layer_sizes(inputs).items()}
        cache, key = TimingCache.of(self.device), network_key(self.body, inputs)
        return choose_joins(self.body, self._given(inputs), kernels, entries, cache, key, sparse)

    def join(self, inputs: tuple[Tensor, ...], joins: Sequence[Join]) -> GraphModule:
        """Run inputs of these shapes with these layers joined; returns the graph that does."""
        assert isinstance(self.body, GraphModule)
        form = joined_form(self.body, joins)
        self._bodies[shapes_of(inputs)] = form
        return form

    def _compiled(
        self,
        size: int,
        body: GraphModule,
        kernels: Mapping[Layer, Kernel],
        inputs: tuple[Tensor, ...],
        planned: bool,
        layers: LayerTime | None,
    ) -> Choice | None:
        """What Inductor makes of the network; None if it is not asked, or fails."""
        if not self.inductor or (planned and size not in self.plan.inductor):
            return None
        if (reason := unavailable(self.device)) is not None:
            self.plan.uncompiled = {**self.plan.uncompiled, INDUCTOR: f"not used: {reason}"}
            return None
        if (spent := self._compiling_seconds) > MAX_SECONDS and not planned:
            reason = f"not tried at batch size {size}, after compiling for {spent:.0f} s"
            self.plan.uncompiled = {**self.plan.uncompiled, INDUCTOR: reason}
            return None
        given = self._given(inputs)
        if planned:
            try:
                choice = Choice(kernels, *compile_body(body, kernels, given))
            except EngineError as error:
                choice = Choice(kernels, failed=str(error))
        else:
            choice = choose(body, given, kernels, TimingCache.of(self.device), network_key(body, inputs), layers)
        self._compiling_seconds += choice.seconds
        if choice.run is None:
            self.plan.lost_seconds += choice.seconds
        if choice.failed is not None:
            what = "not used" if choice.run is None else "not used with sparse layers"
            self.plan.uncompiled = {**self.plan.uncompiled, INDUCTOR: f"{what}: {choice.failed}"}
        return choice

    def _layer_time(self, entries: Sequence[Entry], joins: Sequence[Join]) -> LayerTime | None:
        """How long the layers alone take; None on a CPU, where Inductor has faster dense kernels than eager PyTorch."""
        if self.device.type != "cuda":
            return None
        planned = sum(entry.time_ms or 0.0 for entry in joined_entries(entries, joins))
        with_weights = {layer.name for layer in self.layers if layer.has_weight}
        return LayerTime(planned, sum(entry.dense_ms or 0.0 for entry in entries if entry.layer in with_weights))

    def _current(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _expanded(self, size: int) -> list[Any]:
        """The example with this many images."""
        return self._as_compiled(
            [x[0].to(self.device)] * size if isinstance(x, list) else x.to(self.device).expand(size, *x.shape[1:])
            for x in self.example
        )

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
            weights = (*self.body.buffers(), *self.body.parameters(), self._bodies.get(shapes_of(inputs)))
            dropped = self._recordings.record(self._run, inputs, weights)
            if dropped:
                sizes = ", ".join(str(shapes[0][0]) for shapes in dropped)
                self._note(CUDA_GRAPH, f"dropped for batch size {sizes}: at most {MAX_RECORDINGS} are kept")
        except RuntimeError as error:  # the network may do something that cannot be recorded
            self._note(CUDA_GRAPH, f"not recorded for batch size {len(inputs[0])}: {first_line(error)}")
            torch.cuda.synchronize()

    def _note(self, name: str, reason: str) -> None:
        """Add a reason to those in `Plan.uncompiled`. A new dict, as other threads may print or copy the plan."""
        before = self.plan.uncompiled.get(name)
        if before is None or f"; {reason};" not in f"; {before};":
            after = reason if before is None else f"{before}; {reason}"
            self.plan.uncompiled = {**self.plan.uncompiled, name: after}

    def train(self, mode: bool = True) -> "Compiled":
        """Do nothing: compiled networks are for inference only."""
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> "Compiled":
        moved = args[0](torch.empty(0, dtype=self.dtype, device=self.device))
        if moved.dtype != self.dtype:
            raise EngineError(
                f"the network was compiled to compute in {self.dtype}: compile the model again with dtype={moved.dtype}"
            )
        self._recordings, self._bodies = Recordings(), Bodies()  # they hold the old weights
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if moved.device != self.device:
            move_(self.body, self.device, moved.device)
            old, self.device = self.device, moved.device
            self._adapt(no_sparse_kernels(old, self.dtype))
            sizes = [*self.plan.batches]
            if self.drop_foreign_plan(self.device):
                message = f"running dense: the plan was made for {old.type}, call warmup({sizes}) to plan again"
                warn(message, EngineWarning)
        return self

    def drop_foreign_plan(self, device: torch.device) -> bool:
        """Switch to dense kernels if the plan has sparse ones of another type of device than this one."""
        used = {(kernel, layer.dtype) for layer in self.layers for kernel in layer.kernels.values()}
        here = all(family_of(kernel).unavailable(device, dtype) is None for kernel, dtype in used)
        if here or no_sparse_kernels(device, self.dtype) is not None:
            return False
        for layer in self.layers:
            layer.use({1: FALLBACK})
        self.plan.batches, self.plan.inductor, self.plan.joins = {}, {}, {}
        self.plan.code_bytes, self.plan.lost_seconds = 0, 0.0
        return True

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
                self.plan.code_bytes = self.code_bytes

    def use_plan_of(self, other: "Compiled") -> None:
        """Copy the plan of another network with the same layers."""
        if [(a.name, a.operation) for a in self.layers] != [(b.name, b.operation) for b in other.layers]:
            raise EngineError("plan_from= has other layers than this network: compile without plan_from=")
        joins = [join for found in other.plan.joins.values() for join in found if join.family in FAMILIES]
        sparse = {name for join in joins if FAMILIES[join.family].sparse for name in (join.layer, join.other)}
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            used = {family_of(kernel).sparse for kernel in theirs.kernels.values()} | {mine.name in sparse}
            if not mine.is_2_4 and any(used):
                raise EngineError(f"layer {mine.name} is 2:4 in plan_from= but not here: use the same masks")
            mine.use(theirs.kernels)
        batches = {size: list(table) for size, table in other.plan.batches.items()}
        planned = {size: list(found) for size, found in other.plan.joins.items()}
        self.plan = Plan(batches, dict(self.plan.uncompiled), inductor=dict(other.plan.inductor), joins=planned)

    def save(self, path: str | Path, force: bool = False) -> None:
        """Save the network with its plan and packed weights. `halve.load_compiled` loads it.

        Args:
            path: the file.
            force: replace a file that is no compiled network. Default: raise.
        """
        if not isinstance(self.body, GraphModule) or self.guards is None:
            raise EngineError(
                "the network runs code outside of its graph and cannot be saved: compile the model again, "
                "timings are cached"
            )
        network = SavedNetwork(self.body, self.example, self.dtype, self.guards, self.device, self.plan)
        file.write(path, network, force)

    def fall_back(self, reason: str, expected: bool = False) -> "Compiled":
        """Switch all layers to dense kernels, with a warning unless that is expected, as it is without masks."""
        self.plan.dense, self.plan.code_bytes = reason, 0
        self._sparse_kernels = [dict(layer.kernels) for layer in self.layers]
        for layer in self.layers:
            layer.use({1: FALLBACK})
        if not expected:
            warn(f"running dense: {reason}", EngineWarning)
        return self


@torch.inference_mode(False)
def load(path: str | Path, device: str | torch.device | None = None) -> Compiled:
    """Load a compiled network from a file written by `Compiled.save`.

    Loading never runs code from the file. Raises `FileError` for a file that is damaged, or is not a compiled network.

    Args:
        path: the file.
        device: where to run. Default: the type of device it was saved from, or the CPU if there is none.

    >>> import halve, tempfile, warnings
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    >>> images = torch.randn(2, 4, 8, 8)
    >>> with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
    ...     fast = halve.compile(model, halve.prune(model), images)
    ...     fast.save(f"{folder}/net.compiled.safetensors")
    ...     again = halve.load_compiled(f"{folder}/net.compiled.safetensors")
    >>> torch.equal(again(images), fast(images))
    True
    """
    network = file.read(path)
    uncompiled, inductor = network.plan.uncompiled, bool(network.plan.inductor) or None
    fast = Compiled(network.body, network.example, network.dtype, uncompiled, network.guards, inductor)
    fast.plan = network.plan
    if device is None:
        device = network.device if _is_available(network.device) else "cpu"
    planned = [*dict.fromkeys((*fast.plan.batches, *fast.plan.inductor))]
    dropped = fast.drop_foreign_plan(torch.device(device))
    fast = fast.to(device)
    reason = no_sparse_kernels(fast.device, fast.dtype)
    if fast.reason is None and reason is not None:
        fast.fall_back(reason)
    if fast.device.type == "cuda" or fast.plan.inductor or dropped:
        fast.warmup(planned[-MAX_RECORDINGS:])  # only compiled and recorded, unless the plan was dropped
    fast.plan.code_bytes = fast.code_bytes  # emits it: the file has none
    return fast


def _is_available(device: torch.device) -> bool:
    return device.type == "cpu" or bool(torch.get_device_module(device.type).is_available())


def _one_image(x: Images) -> Any:
    """A copy of the first image, since the caller may modify theirs. Images from files are one number, expanded."""
    if isinstance(x, list):
        return [_one_image(image[None])[0] for image in x[:1]]
    image = x[:1].detach().cpu()
    expanded = image.numel() > 1 and image.untyped_storage().nbytes() == image.element_size()
    return image if expanded else image.clone()


def _planar_inputs(body: nn.Module, count: int) -> list[bool]:
    """Which inputs are only read by first layers, whose kernels take contiguous images: these are not converted."""
    if not isinstance(body, GraphModule):
        return [False] * count
    readers = [
        [body.get_submodule(str(user.target)) if user.op == "call_module" else None for user in node.users]
        for node in body.graph.nodes
        if node.op == "placeholder"
    ]
    return [
        bool(found) and all(isinstance(one, Layer) and isinstance(one.operation, PooledConvolution) for one in found)
        for found in readers
    ]


def _without_gaps(y: Tensor) -> Tensor:
    """An output in a usual memory format. Layers may leave space between the channels of their outputs."""
    usual = y.is_contiguous() or (y.dim() == 4 and y.is_contiguous(memory_format=_NHWC))
    return y if usual else y.contiguous()


def _batched(example: Tensor) -> str:
    return f"({', '.join(map(str, ('N', *example.shape[1:])))})"
