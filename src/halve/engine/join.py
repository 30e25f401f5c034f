"""Run two layers in one kernel, where that is faster.

A residual block that changes the number of channels ends in two layers: one convolves the shortcut, the other adds the
result of the first to its own. Joined, they are one sum. And the 1x1 convolution that begins the next block can be
computed while the result of a block is still on the chip.

Like kernels, joins are chosen for each input shape, so the network itself is not changed: for a shape whose plan joins
layers, a form of its graph is built when it is needed.
"""

import copy
import itertools
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel, Piece
from halve.engine.kernels.registry import family_of, kernels_for
from halve.engine.layer import Layer
from halve.engine.layer_times import Jobs, compilations, compile_all, time_layer
from halve.engine.operations import ChainedConvolution, Convolution, JoinedConvolution, Operation, split_results
from halve.engine.plan import Entry, PlannedJoin
from halve.engine.timing import measure
from halve.engine.timing_cache import TimingCache, kernel_id
from halve.engine.visit import visit

_AND = " + "  # between the names of joined layers
_STRIDES = ((1, 1), (2, 2))  # of a shortcut
Nodes = Mapping[torch.nn.Module, Node]  # the call of each layer in a graph


class Pair(ABC):
    """Two layers that one kernel can compute."""

    layer: Layer
    other: Layer

    @property
    @abstractmethod
    def first(self) -> Layer:
        """The layer that runs first."""

    @property
    def last(self) -> Layer:
        return self.other if self.first is self.layer else self.layer

    @property
    @abstractmethod
    def operation(self) -> Operation:
        """What both compute."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the operation."""

    @abstractmethod
    def inputs(self, of_layer: Sequence[Tensor], of_other: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of the operation, from those of the layers."""

    @abstractmethod
    def replace(self, form: GraphModule, name: str, nodes: Nodes) -> None:
        """Call the module `name` in a graph instead of the two layers."""

    def joined(self) -> Layer:
        """One layer that computes both."""
        return Layer(f"{self.layer.name}{_AND}{self.other.name}", self.operation, self.tensors())


@dataclass(frozen=True)
class WithShortcut(Pair):
    """A convolution and the 1x1 convolution of its shortcut. Either may run last, and adds the result of the other."""

    layer: Layer
    other: Layer
    adds: Layer

    @property
    def first(self) -> Layer:
        return self.other if self.adds is self.layer else self.layer

    @property
    def operation(self) -> JoinedConvolution:
        ours, theirs, last = (_convolution(one) for one in (self.layer, self.other, self.adds))
        return JoinedConvolution(
            *(ours.rows, ours.channels, ours.kernel, ours.padding, ours.dilation, last.activation),
            *(theirs.channels, theirs.stride),
        )

    def tensors(self) -> dict[str, Tensor]:
        parts = self.layer.tensors(), self.other.tensors()
        biases = [part["bias"] for part in parts if "bias" in part]
        bias = {"bias": sum(biases[1:], biases[0])} if biases else {}
        return {"weight": parts[0]["weight"], "shortcut_weight": parts[1]["weight"], **bias}

    def inputs(self, of_layer: Sequence[Tensor], of_other: Sequence[Tensor]) -> list[Tensor]:
        return [of_layer[0], of_other[0]]

    def replace(self, form: GraphModule, name: str, nodes: Nodes) -> None:
        last = nodes[self.adds]
        last.target, last.args = name, (nodes[self.layer].args[0], nodes[self.other].args[0])
        form.graph.erase_node(nodes[self.first])


@dataclass(frozen=True)
class WithNext(Pair):
    """The end of a residual block, and a 1x1 convolution that reads it."""

    layer: Layer
    other: Layer

    @property
    def first(self) -> Layer:
        return self.layer

    @property
    def operation(self) -> ChainedConvolution:
        ours, following = self.layer.operation, _convolution(self.other)
        assert isinstance(ours, Convolution | JoinedConvolution)
        shortcut = ours.shortcut_channels if isinstance(ours, JoinedConvolution) else 0
        return ChainedConvolution(
            ours.rows, ours.channels, ours.activation, following.rows, following.activation, shortcut
        )

    def tensors(self) -> dict[str, Tensor]:
        return {**self.layer.tensors(), **{f"next_{name}": tensor for name, tensor in self.other.tensors().items()}}

    def inputs(self, of_layer: Sequence[Tensor], of_other: Sequence[Tensor]) -> list[Tensor]:
        return list(of_layer)

    def replace(self, form: GraphModule, name: str, nodes: Nodes) -> None:
        node, following = nodes[self.layer], nodes[self.other]
        with form.graph.inserting_before(node):
            both = form.graph.call_module(name, node.args)
            results = form.graph.call_function(split_results, (both, node.args[0], self.operation.rows))
            for place, replaced in enumerate((node, following)):
                replaced.replace_all_uses_with(form.graph.call_function(operator.getitem, (results, place)))
        form.graph.erase_node(following)
        form.graph.erase_node(node)


@dataclass(frozen=True)
class Join:
    """Two layers, the one that replaces them, and its kernel."""

    pair: Pair
    both: Layer
    kernel: Kernel
    time_ms: float | None = None

    @property
    def planned(self) -> PlannedJoin:
        return PlannedJoin(self.pair.layer.name, self.pair.other.name, *self.kernel)


def choose_joins(
    body: GraphModule,
    inputs: tuple[Tensor, ...],
    kernels: Mapping[Layer, Kernel],
    entries: Sequence[Entry],
    cache: TimingCache,
    key: str | None,
    sparse: bool = True,
) -> list[Join]:
    """The layers to join for these inputs: those that are faster joined, if the whole network is; otherwise none.

    Args:
        body: the fused network, whose layers use `kernels`.
        inputs: inputs in the compute dtype.
        kernels: the planned kernel of each layer for these inputs.
        entries: the plan for these inputs, with the times of these kernels.
        cache: earlier timings.
        key: cache key of the network. Default: do not cache.
        sparse: False joins layers with all their weights.
    """
    times = {entry.layer: entry.time_ms for entry in entries if entry.time_ms is not None}
    joins: list[Join] = []
    for pairs in KINDS:
        form, used = joined_form(body, joins) if joins else body, joined_kernels(kernels, joins)
        found = _faster(form, pairs(form), inputs, times, cache, sparse)
        if found and _is_faster(form, found, used, inputs, cache, key):
            joins += found
            times |= {join.both.name: join.time_ms for join in found if join.time_ms is not None}
    return joins


def planned_joins(
    body: GraphModule, planned: Sequence[PlannedJoin], sizes: Mapping[Layer, int], device: torch.device
) -> list[Join]:
    """The joins of a plan, those that this network and device can have. `sizes` has the input size of each layer."""
    wanted = {(join.layer, join.other): Kernel(join.family, join.variant) for join in planned}
    known = dict(sizes)
    joins: list[Join] = []
    for pairs in KINDS if wanted else ():
        for pair in pairs(joined_form(body, joins)):
            kernel = wanted.get((pair.layer.name, pair.other.name))
            if kernel is None or not {pair.layer, pair.other} <= known.keys():
                continue
            if kernel not in (both := pair.joined()).available_kernels(device):
                continue
            known[both] = known[pair.layer]
            both.use({known[both]: kernel})
            joins.append(Join(pair, both, kernel))
    return joins


def joined_form(body: GraphModule, joins: Sequence[Join]) -> GraphModule:
    """The network with these layers joined. It shares all other layers."""
    form = GraphModule(body, copy.deepcopy(body.graph))
    unused = (name for number in itertools.count() if not hasattr(form, name := f"joined{number}"))
    for join, name in zip(joins, unused, strict=False):
        nodes = {form.get_submodule(str(node.target)): node for node in form.graph.nodes if node.op == "call_module"}
        form.add_submodule(name, join.both)
        join.pair.replace(form, name, nodes)
    form.delete_all_unused_submodules()
    form.recompile()
    return form.eval()


def joined_kernels(kernels: Mapping[Layer, Kernel], joins: Sequence[Join]) -> dict[Layer, Kernel]:
    """The kernels of the joined network."""
    used = dict(kernels)
    for join in joins:
        for layer in (join.pair.layer, join.pair.other):
            used.pop(layer)
        used[join.both] = join.kernel
    return used


def joined_entries(entries: Sequence[Entry], joins: Sequence[Join]) -> list[Entry]:
    """The entries of a plan with these layers joined. The time of all of them is that of the first."""
    shown: dict[str, str] = {}  # the entry of a joined layer
    others: dict[str, list[str]] = {}
    last: dict[str, Join] = {}
    for join in joins:
        name = shown.get(join.pair.layer.name, join.pair.layer.name)
        shown[join.both.name], last[name] = name, join
        others.setdefault(name, []).append(join.pair.other.name)
    changed: dict[str, dict[str, Any]] = {}
    for name, join in last.items():
        common: dict[str, Any] = {"kernel": str(join.kernel), "sparse": family_of(join.kernel).sparse}
        reason = f"in one kernel with {' and '.join(others[name])}: faster"
        changed[name] = common | {"time_ms": join.time_ms, "reason": reason}
        for other in others[name]:
            changed[other] = common | {"time_ms": 0.0, "reason": f"in the kernel of {name}"}
    return [replace(entry, **changed.get(entry.layer, {})) for entry in entries]


def separated_entries(
    entries: Sequence[Entry], joins: Sequence[PlannedJoin], kernels: Mapping[Layer, Kernel]
) -> list[Entry]:
    """The entries of a plan with these joined layers separate again. The times of their kernels are not known."""
    used = {layer.name: kernel for layer, kernel in kernels.items()}
    apart = {name for join in joins for both in (join.layer, join.other) for name in both.split(_AND)} & used.keys()
    reason = "planned in one kernel with its neighbour, which is not used here"
    return [
        replace(
            entry,
            kernel=str(used[entry.layer]),
            sparse=family_of(used[entry.layer]).sparse,
            time_ms=None,
            reason=reason,
        )
        if entry.layer in apart
        else entry
        for entry in entries
    ]


def pairs_with_shortcut(body: GraphModule) -> Iterator[Pair]:
    """Convolutions and those of their shortcuts: the result of the first is only read by the last, which adds it."""
    names = _names(body)
    for node in body.graph.nodes:
        last, added = _layer(body, node), node.args[1] if len(node.args) == 2 else None
        if last is None or not isinstance(added, Node) or len(added.users) != 1 or len(added.args) != 1:
            continue
        if node.args[0] is added:  # the last layer also convolves it
            continue
        first = _layer(body, added)
        if first is None or first.dtype != last.dtype or {names[first.name], names[last.name]} != {1}:
            continue
        if getattr(first.operation, "activation", None) != "none":
            continue
        for layer, shortcut in ((last, first), (first, last)):
            if _is_plain(layer.operation) and _is_pointwise(shortcut.operation, _STRIDES):
                yield WithShortcut(layer, shortcut, last)
                break


def pairs_with_next(body: GraphModule) -> Iterator[Pair]:
    """Ends of residual blocks and 1x1 convolutions that read them. No layer is in two pairs."""
    names, taken = _names(body), set()
    for node in body.graph.nodes:
        following, read = _layer(body, node), node.args[0] if len(node.args) == 1 else None
        layer = _layer(body, read) if isinstance(read, Node) else None
        if following is None or layer is None or not isinstance(read, Node) or len(read.args) != 2:
            continue
        if layer.dtype != following.dtype or {names[layer.name], names[following.name]} != {1}:
            continue
        if _is_end(layer.operation) and _is_pointwise(following.operation, _STRIDES[:1]) and layer not in taken:
            taken.add(layer)
            yield WithNext(layer, following)


KINDS = (pairs_with_shortcut, pairs_with_next)  # in this order: the second kind reads what the first has joined


def _names(body: GraphModule) -> Counter[str]:
    """How many layers have each name. Plans know layers by their names: those that are not unique stay apart."""
    return Counter(layer.name for layer in body.modules() if isinstance(layer, Layer))


def _is_plain(operation: Operation) -> bool:
    return (
        isinstance(operation, Convolution)
        and operation.stride == (1, 1)
        and operation.groups == 1
        and not operation.scaled
    )


def _is_pointwise(operation: Operation, strides: Sequence[tuple[int, int]]) -> bool:
    return (
        isinstance(operation, Convolution)
        and (operation.kernel, operation.padding, operation.groups, operation.scaled) == ((1, 1), (0, 0), 1, False)
        and operation.stride in strides
    )


def _is_end(operation: Operation) -> bool:
    """Whether an operation with a second input is a 1x1 convolution, with a residual or a shortcut of stride 1."""
    if isinstance(operation, JoinedConvolution):
        return (operation.kernel, operation.padding, operation.shortcut_stride) == ((1, 1), (0, 0), (1, 1))
    return _is_pointwise(operation, _STRIDES[:1])


def _layer(body: GraphModule, node: Node) -> Layer | None:
    module = body.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, Layer) else None


def _convolution(layer: Layer) -> Convolution:
    assert isinstance(layer.operation, Convolution)
    return layer.operation


def _faster(
    body: GraphModule,
    pairs: Iterator[Pair],
    inputs: tuple[Tensor, ...],
    times: Mapping[str, float],
    cache: TimingCache,
    sparse: bool,
) -> list[Join]:
    """The pairs for which one kernel is faster than two. `times` has those of the layers."""
    device, run = inputs[0].device, partial(body, *inputs)
    together = with_kernels(pairs, device)
    if not together:
        return []
    compile_all(joined_compilations(together, run, cache, device))
    found = []

    def time_both(pair: Pair, given: list[Tensor]) -> None:
        apart = [times.get(layer.name, 0.0) for layer in (pair.layer, pair.other)]
        measured = time_layer(together[pair], given, cache, device, sparse=True)
        kernel = measured.best_ours if sparse else measured.best_our_dense
        if kernel is None or 0.0 in apart or measured.times[kernel] >= sum(apart):
            return
        together[pair].use({measured.size: kernel})
        found.append(Join(pair, together[pair], kernel, measured.times[kernel]))

    _visit(together, run, time_both)
    cache.save()
    return found


def with_kernels(pairs: Iterator[Pair], device: torch.device) -> dict[Pair, Layer]:
    """The pairs for which there is a kernel of ours, or would be if they are 2:4, and the layers that replace them."""

    def has_kernel(pair: Pair) -> bool:
        kernels = kernels_for(Piece(pair.operation, pair.layer.dtype, is_2_4=True), device)
        return any(not family_of(kernel).library for kernel in kernels)

    return {pair: pair.joined() for pair in pairs if has_kernel(pair)}


def joined_compilations(
    together: Mapping[Pair, Layer], run: Callable[[], object], cache: TimingCache, device: torch.device
) -> Jobs:
    """What must be compiled before the kernels of joined layers are timed, on the inputs that `run` gives them."""
    jobs: Jobs = {}
    _visit(together, run, lambda pair, given: jobs.update(compilations(together[pair], given, cache, device, True)))
    return jobs


def _is_faster(
    body: GraphModule,
    joins: Sequence[Join],
    kernels: Mapping[Layer, Kernel],
    inputs: tuple[Tensor, ...],
    cache: TimingCache,
    key: str | None,
) -> bool:
    def measured() -> dict[str, float]:
        forms = {"separate": body, "joined": joined_form(body, joins)}
        return measure({name: partial(form, *inputs) for name, form in forms.items()}, inputs[0].device)

    together = [f"{join.both.name}: {kernel_id(join.kernel)}" for join in joins]
    described = jit.digest(*map(kernel_id, kernels.values()), *together)
    times = cache.look_up(key, {name: f"{name} {described}" for name in ("separate", "joined")}, measured)
    cache.save()
    return times["joined"] < times["separate"]


def _visit(
    together: Mapping[Pair, Layer], run: Callable[[], object], look: Callable[[Pair, list[Tensor]], None]
) -> None:
    """Run the network, and show the inputs of each pair before the last of its layers runs."""
    by_last = {pair.last: pair for pair in together}
    seen: dict[Layer, list[Tensor]] = {}
    firsts = {pair.first for pair in together}

    def note(layer: Layer, inputs: list[Tensor]) -> None:
        pair = by_last.get(layer)
        if layer in firsts:
            seen[layer] = inputs
        if pair is not None and pair.first in seen:
            first = seen.pop(pair.first)
            of_layer, of_other = (inputs, first) if pair.last is pair.layer else (first, inputs)
            look(pair, pair.inputs(of_layer, of_other))

    visit(list(firsts | by_last.keys()), run, note)
