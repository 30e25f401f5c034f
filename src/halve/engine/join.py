"""Join a layer and the convolution of its shortcut into one kernel, where that is faster.

A residual block that changes the number of channels ends in two layers: one convolves the shortcut, the other adds the
result of the first to its own. Joined, they are one sum. Like kernels, joins are chosen for each input shape, so the
network itself is not changed: for a shape whose plan joins layers, a form of its graph is built when it is needed.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import family_of
from halve.engine.layer import Layer
from halve.engine.operations import Convolution, JoinedConvolution
from halve.engine.plan import Entry, Jobs, PlannedJoin, compilations, compile_all, time_layer, visit
from halve.engine.timing import measure
from halve.engine.timing_cache import TimingCache, kernel_id

_STRIDES = ((1, 1), (2, 2))  # of a shortcut


class Pair(NamedTuple):
    """A layer and the layer of its shortcut. Either of them may run last, and add the result of the other."""

    layer: Layer
    shortcut: Layer
    last: Layer

    @property
    def first(self) -> Layer:
        return self.shortcut if self.last is self.layer else self.layer

    def joined(self) -> Layer:
        """One layer that computes both."""
        ours, theirs = self.layer.operation, self.shortcut.operation
        assert isinstance(ours, Convolution)
        assert isinstance(theirs, Convolution)
        activation = ours.activation if self.last is self.layer else theirs.activation
        operation = JoinedConvolution(
            *(ours.rows, ours.channels, ours.kernel, ours.padding, ours.dilation, activation),
            *(theirs.channels, theirs.stride),
        )
        parts = self.layer.tensors(), self.shortcut.tensors()
        tensors = {"weight": parts[0]["weight"], "shortcut_weight": parts[1]["weight"]}
        biases = [part["bias"] for part in parts if "bias" in part]
        if biases:
            tensors["bias"] = sum(biases[1:], biases[0])
        return Layer(f"{self.layer.name} + {self.shortcut.name}", operation, tensors)


@dataclass(frozen=True)
class Join:
    """Two layers, the one that replaces them, and its kernel."""

    pair: Pair
    both: Layer
    kernel: Kernel
    time_ms: float | None = None

    @property
    def planned(self) -> PlannedJoin:
        return PlannedJoin(self.pair.layer.name, self.pair.shortcut.name, *self.kernel)


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
    device, run = inputs[0].device, partial(body, *inputs)
    together = {pair: both for pair in pairs(body) if (both := _joinable(pair, device)) is not None}
    if not together:
        return []
    jobs: Jobs = {}
    _visit(together, run, lambda pair, given: jobs.update(compilations(together[pair], given, cache, device, True)))
    compile_all(jobs)
    known, found = {entry.layer: entry.time_ms for entry in entries}, []

    def time_both(pair: Pair, given: list[Tensor]) -> None:
        separate = [known.get(one.name) for one in (pair.layer, pair.shortcut)]
        times = time_layer(together[pair], given, cache, device, sparse=True)
        kernel = times.best_ours if sparse else times.best_our_dense
        if kernel is None or None in separate or times.times[kernel] >= sum(filter(None, separate)):
            return
        together[pair].use({times.size: kernel})
        found.append(Join(pair, together[pair], kernel, times.times[kernel]))

    _visit(together, run, time_both)
    cache.save()
    return found if found and _is_faster(body, found, kernels, inputs, cache, key) else []


def planned_joins(
    body: GraphModule, planned: Sequence[PlannedJoin], sizes: Mapping[Layer, int], device: torch.device
) -> list[Join]:
    """The joins of a plan, those that this network and device can have. `sizes` has the input size of each layer."""
    wanted = {(join.layer, join.shortcut): Kernel(join.family, join.variant) for join in planned}
    found = []
    for pair in pairs(body) if wanted else ():
        kernel = wanted.get((pair.layer.name, pair.shortcut.name))
        both = pair.joined()
        if kernel is not None and kernel in both.available_kernels(device):
            both.use({sizes[pair.layer]: kernel})
            found.append(Join(pair, both, kernel))
    return found


def joined_form(body: GraphModule, joins: Sequence[Join]) -> GraphModule:
    """The network with these layers joined. It shares all other layers."""
    form = GraphModule(body, copy.deepcopy(body.graph))
    nodes = {form.get_submodule(str(node.target)): node for node in form.graph.nodes if node.op == "call_module"}
    for number, join in enumerate(joins):
        pair = join.pair
        last, first = nodes[pair.last], nodes[pair.first]
        last.args = (nodes[pair.layer].args[0], nodes[pair.shortcut].args[0])
        form.add_submodule(name := f"joined{number}", join.both)
        last.target = name
        form.graph.erase_node(first)
    form.delete_all_unused_submodules()
    form.recompile()
    return form.eval()


def joined_kernels(kernels: Mapping[Layer, Kernel], joins: Sequence[Join]) -> dict[Layer, Kernel]:
    """The kernels of the joined network."""
    replaced = {layer for join in joins for layer in (join.pair.layer, join.pair.shortcut)}
    separate = {layer: kernel for layer, kernel in kernels.items() if layer not in replaced}
    return separate | {join.both: join.kernel for join in joins}


def joined_entries(entries: Sequence[Entry], joins: Sequence[Join]) -> list[Entry]:
    """The entries of a plan with these layers joined. The time of both is that of the layer."""
    changed: dict[str, dict[str, Any]] = {}
    for join in joins:
        layer, shortcut = join.pair.layer.name, join.pair.shortcut.name
        common: dict[str, Any] = {"kernel": str(join.kernel), "sparse": family_of(join.kernel).sparse}
        reason = f"in one kernel with {shortcut}, faster than two"
        changed[layer] = common | {"time_ms": join.time_ms, "reason": reason}
        changed[shortcut] = common | {"time_ms": 0.0, "reason": f"in the kernel of {layer}"}
    return [replace(entry, **changed.get(entry.layer, {})) for entry in entries]


def pairs(body: GraphModule) -> Iterator[Pair]:
    """Pairs of layers that can be joined: the result of the first is only read by the last, which adds it."""
    names = Counter(layer.name for layer in body.modules() if isinstance(layer, Layer))
    for node in body.graph.nodes:
        last, added = _layer(body, node), node.args[1] if len(node.args) == 2 else None
        if last is None or not isinstance(added, Node) or len(added.users) != 1 or len(added.args) != 1:
            continue
        first = _layer(body, added)
        if first is None or first.dtype != last.dtype or {names[first.name], names[last.name]} != {1}:
            continue  # plans know layers by their names
        if getattr(first.operation, "activation", None) != "none":
            continue
        for layer, shortcut in ((last, first), (first, last)):
            if _is_plain(layer) and _is_shortcut(shortcut):
                yield Pair(layer, shortcut, last)
                break


def _is_plain(layer: Layer) -> bool:
    conv = layer.operation
    return isinstance(conv, Convolution) and conv.stride == (1, 1) and conv.groups == 1 and not conv.scaled


def _is_shortcut(layer: Layer) -> bool:
    conv = layer.operation
    return (
        isinstance(conv, Convolution)
        and (conv.kernel, conv.padding, conv.groups, conv.scaled) == ((1, 1), (0, 0), 1, False)
        and conv.stride in _STRIDES
    )


def _layer(body: GraphModule, node: Node) -> Layer | None:
    module = body.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, Layer) else None


def _joinable(pair: Pair, device: torch.device) -> Layer | None:
    """The joined layer, if there is a kernel of ours for it."""
    both = pair.joined()
    return both if any(not family_of(kernel).library for kernel in both.available_kernels(device)) else None


def _is_faster(
    body: GraphModule,
    joins: Sequence[Join],
    kernels: Mapping[Layer, Kernel],
    inputs: tuple[Tensor, ...],
    cache: TimingCache,
    key: str | None,
) -> bool:
    described = " ".join(map(kernel_id, [*kernels.values(), *(join.kernel for join in joins)]))
    ids = {f"{name} {described}": name for name in ("separate", "joined")}
    times = None if key is None else cache.get(key, ids)
    if times is None:
        forms: dict[str, GraphModule] = {"separate": body, "joined": joined_form(body, joins)}
        measured = measure({name: partial(forms[name], *inputs) for name in forms}, inputs[0].device)
        times = {described: measured[name] for described, name in ids.items()}
        if key is not None:
            cache.put(key, times)
            cache.save()
    separate, joined = (times[described] for described in ids)
    return joined < separate


def _visit(
    together: Mapping[Pair, Layer], run: Callable[[], object], look: Callable[[Pair, list[Tensor]], None]
) -> None:
    """Run the network, and show the inputs of both layers of each pair before the last of them runs."""
    by_first, by_last = {pair.first: pair for pair in together}, {pair.last: pair for pair in together}
    seen: dict[Pair, Tensor] = {}

    def note(layer: Layer, inputs: list[Tensor]) -> None:
        if layer in by_first:
            seen[by_first[layer]] = inputs[0]
        elif (pair := by_last[layer]) in seen:
            first, last = seen.pop(pair), inputs[0]
            look(pair, [last, first] if layer is pair.layer else [first, last])

    visit([*by_first, *by_last], run, note)
