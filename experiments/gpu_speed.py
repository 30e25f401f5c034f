"""Tables and sentences about speed on a GPU, from benchmarks/results/gpu.json, gpu_layers.json and conv3x3.json."""

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from page_text import prose, table
from records import (
    best_dense,
    fastest_dense,
    is_main,
    measured_on,
    name_of,
    networks_and_batches,
    paired,
    recorded,
    span,
    speedups,
    times,
)

SYSTEMS = {
    "eager": "eager",
    "compile": "torch.compile",
    "compile_freezing": "torch.compile, freezing",
    "best_dense": "folded, dense",
    "halve_dense": "our kernels, dense",
    "halve": "halve",
}
SMALL = 1.1  # networks that gain less are named
GOALS = {  # over the best dense version, at batches 1, 8, 32 and 256
    "resnet18": (1.8, 1.75, 1.8, 1.8),
    "resnet34": (1.8, 1.75, 1.8, 1.8),
    "resnet50": (1.7, 1.4, 1.5, 1.6),
    "convnext_tiny": (1.15, 1.15, 1.25, 1.4),
    "convnext_small": (1.15, 1.15, 1.25, 1.4),
}
NOT_SLOWER = 0.98  # the goal for all others
GOAL_3X3 = 1.5, 1.3  # over cuDNN, and over the same kernel with all weights


def headline() -> str:
    """The speed of networks, with its conditions."""
    gpu = recorded("benchmarks/results/gpu.json")[0]
    return (
        f"- **{span(speedups(main=True).values())}x the speed** of the best dense version of {_networks(main=True)}, "
        f"at batches of 1 to 256 ({gpu['dtype']}, {gpu['hardware']}). {_others()}"
    )


def speed_brief() -> str:
    """Whole networks in the README: milliseconds, and the speed-up over the best dense version."""
    ms, batches = times(), _batches()
    rows = []
    for network in dict.fromkeys(network for network, _ in speedups(main=True)):
        cells = []
        for batch in batches:
            dense, ours = best_dense(network, batch), ms.get((network, batch, "halve"))
            cells.append(f"{ours:.{2 if ours >= 1 else 3}f} ms, **{dense / ours:.2f}x**" if dense and ours else "")
        rows.append([name_of(network), *cells])
    split = _split()
    largest = max(batches)
    few, many = (
        span([parts.sparsity for (_, batch), parts in split.items() if (batch == largest) == is_largest])
        for is_largest in (False, True)
    )
    convnexts = [_sparsity(*pair).ratio for pair in speedups(main=True) if pair not in split]
    gains = [ratio for pair, ratio in speedups(main=True).items() if pair in split]
    note = prose(
        f"{measured_on(recorded('benchmarks/results/gpu.json'))}; float16, 224 px, over the faster of torch.compile "
        f"with freezing and the same folded and fused graph on library kernels. Of the {span(gains)}x of ResNets, "
        f"sparsity itself is {few}x at smaller batches and {many}x at batch {largest}; on ConvNeXts it is "
        f"{span(convnexts)}x by the times of their layers. The rest is due to fusion and to our kernels. {_others()}"
    )
    return f"{table(['', *(f'batch {batch}' for batch in batches)], rows)}\n\n{note}"


def speed_limit() -> str:
    """What the README says under "Limits"."""
    return prose(
        f"- **Networks.** Speed on a GPU has been measured on {_networks(main=True)}, and on {_networks(main=False)}. "
        "Where little time is spent in masked layers, the gain comes from fusion and from kernels for depthwise "
        f"convolutions and pooling, not from masks. {_dense_plans()}"
    )


def gpu_summary() -> str:
    """How many networks and batch sizes are faster than the best dense version, by their intervals."""
    ratios = speedups(main=True) | speedups(main=False)
    intervals = {pair: paired(*pair) for pair in ratios}
    low = {pair: interval.low for pair, interval in intervals.items() if interval is not None}
    worst = min(low, key=low.__getitem__)
    faster = [pair for pair in low if low[pair] > 1]
    networks, batches = len({network for network, _ in ratios}), len(_batches())
    many = f"{networks} networks at {'' if networks * batches == len(ratios) else 'up to '}{batches} batch sizes"
    words = (
        f"In {_of(len(faster), len(ratios))} cases ({many}) halve is at least as fast as the best dense version: "
        f"{span(ratios.values())}x. "
    )
    rest = [
        f"{name_of(pair[0])} at batch {pair[1]}: {intervals[pair] or 'no interval'}"
        for pair in ratios
        if pair not in faster
    ]
    words += f"The others: {'; '.join(rest)}. " if rest else ""
    words += (
        f"The lowest end of a 95 % interval is {low[worst]:.3f}x ({name_of(worst[0])}, batch {worst[1]}). {_small()}"
        f"{_energy()}"
    )
    return prose(words)


def gpu() -> str:
    """Whole networks on a GPU: milliseconds per batch, the speed-up over the best dense version, and energy."""
    ms, rows = times(), []
    joules = _millijoules()
    systems = {system: name for system, name in SYSTEMS.items() if any(key[2] == system for key in ms)}
    for network, batch in networks_and_batches():
        found = [ms.get((network, batch, system)) for system in systems]
        dense, ours = best_dense(network, batch), ms.get((network, batch, "halve"))
        ratio = f"{dense / ours:.2f}x" if dense and ours else ""
        if (interval := paired(network, batch)) is not None:
            ratio += f" ({interval.low:.2f} to {interval.high:.2f})"
        energy = [joules.get((network, batch, system)) for system in (fastest_dense(network, batch), "halve")]
        cells = ["" if t is None else f"{t:.3f}" for t in found]
        spent = " / ".join(f"{mj:.1f}" for mj in energy if mj is not None)
        rows.append([f"{name_of(network)}, batch {batch}", *cells, ratio, spent])
    records = recorded("benchmarks/results/gpu.json")
    note = (
        f"{measured_on(records)}; {records[0]['dtype']}, 224 px (`benchmarks/bench_gpu.py`). Systems without a time "
        "were not measured there. Ratios are those of median times; in brackets, the 95 % interval of the ratio, "
        "paired by rounds. Energy is that of the fastest dense version, and of halve."
    )
    heads = ["ms per batch", *systems.values(), "over the fastest dense", "mJ per image, dense / halve"]
    return f"{table(heads, rows)}\n\n{prose(note)}"


def gpu_split() -> str:
    """The speed-up of ResNets, as that of our kernels times that of sparsity."""
    split = _split()
    batches = sorted({batch for _, batch in split})
    rows = []
    for network in dict.fromkeys(network for network, _ in split):
        cells = []
        for batch in batches:
            parts = split.get((network, batch))
            cells.append("" if parts is None else f"{parts.kernels:.2f} x **{parts.sparsity:.2f}**")
        rows.append([name_of(network), *cells])
    return table(["kernels x sparsity", *(f"batch {batch}" for batch in batches)], rows)


def gpu_sparsity() -> str:
    """What masks are worth by the times of layers, for all networks."""
    batches, rows = _batches(), []
    for network in [*dict.fromkeys(network for main in (True, False) for network, _ in speedups(main))]:
        cells = []
        for batch in batches:
            found = _sparsity(network, batch)
            cells.append(f"{found.ratio:.2f}x, {found.sparse} of {found.able}" if found.able else "")
        rows.append([name_of(network), *cells])
    heads = ["gain by sparse layers, their number", *(f"batch {batch}" for batch in batches)]
    return f"{table(heads, rows)}\n\n{prose(_dense_plans())}"


def gpu_layers() -> str:
    """Masked layers on a GPU: microseconds dense, on our kernels with all weights, and with half of them."""
    records = [r for r in recorded("benchmarks/results/gpu_layers.json") if is_main(r["network"])]
    kinds: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    names = {(r["network"], r["layer"]): re.sub(r" at \d+( x |$)", r" at\1", r["shape"]) for r in records}
    names = {key: shape.replace(" at x ", " at ").removesuffix(" at") for key, shape in names.items()}
    for record in records:
        if record["sparse_ms"] is not None:
            kind = record["network"], names[record["network"], record["layer"]]
            kinds.setdefault(kind, {}).setdefault(record["batch"], []).append(record)
    batches, rows = sorted({record["batch"] for record in records}), []
    for (network, shape), found in kinds.items():
        cells = []
        for batch in batches:
            if batch not in found:
                cells.append("")
                continue
            means = [
                statistics.mean(1000 * record[kind] for record in found[batch])
                for kind in ("dense_ms", "our_dense_ms", "sparse_ms")
            ]
            words = [f"{time:.1f}" if time < 10 else f"{time:.0f}" for time in means]
            fastest = means.index(min(means))
            words[fastest] = f"**{words[fastest]}**"
            cells.append(" / ".join(words))
        rows.append([f"{name_of(network)} {shape}", str(max(map(len, found.values()))), *cells])
    heads = ["library / our kernels dense / sparse, microseconds", "layers", *(f"batch {batch}" for batch in batches)]
    return f"{table(heads, rows)}\n\n{measured_on(records)}; {records[0]['dtype']}."


def conv3x3() -> str:
    """3x3 layers on a GPU: microseconds of our kernel with half of the weights and with all, and of cuDNN."""
    rows = []
    for layer in _conv3x3():
        cells = [f"{1e3 * time:.1f}" for time in (layer.library, layer.dense, layer.sparse)]
        rows.append([layer.name, *cells, f"{layer.over_library:.2f}x", f"{layer.over_dense:.2f}x"])
    heads = ["microseconds", "cuDNN", "our kernel, all weights", "2:4", "over cuDNN", "over all weights"]
    about = measured_on(recorded("benchmarks/results/conv3x3.json"))
    return f"{table(heads, rows)}\n\n{about} (`benchmarks/bench_3x3.py`); float16, with bias and ReLU."


def conv3x3_planned() -> str:
    """3x3 layers of stride 1 in the plans of ResNets, by batch size."""
    rows = []
    for batch, layers in _planned_3x3().items():
        cells = []
        for all_ms, ratios in (
            (sum(layer.library for layer in layers), [layer.over_library for layer in layers]),
            (sum(layer.dense for layer in layers), [layer.over_dense for layer in layers]),
        ):
            together = all_ms / sum(layer.sparse for layer in layers)
            cells.append(f"{together:.2f}x ({span(ratios)})")
        rows.append([str(batch), str(len(layers)), *cells])
    return table(["batch", "layers", "over the library", "over all weights"], rows)


def gpu_goals() -> str:
    """The goals, and what was measured. Those that are missed are bold."""
    ratios = speedups(main=True) | speedups(main=False)
    rows, missed = [], []
    for network, goals in GOALS.items():
        cells = []
        for batch, goal in zip((1, 8, 32, 256), goals, strict=True):
            ratio = ratios[network, batch]
            cells.append(f"{ratio:.2f} ({goal:g})" if ratio >= goal else f"**{ratio:.2f}** ({goal:g})")
            if ratio < goal:
                missed.append(f"{name_of(network)} at batch {batch} ({ratio:.2f} of {goal:g})")
        rows.append([name_of(network), *cells])
    highs = {pair: interval.high for pair in ratios if (interval := paired(*pair)) is not None}
    slower = [f"{name_of(network)} at batch {batch}" for (network, batch), high in highs.items() if high < NOT_SLOWER]
    notes = [
        f"- Missed: {', '.join(missed) or 'none'}.",
        f"- No network slower (intervals reach {NOT_SLOWER:g}x): {len(highs) - len(slower)} of {len(highs)} cases"
        + (f"; not {', '.join(slower)}." if slower else "."),
    ]
    groups = {
        "`conv3x3.json`": _by_batch(_conv3x3()),
        "`gpu_layers.json`, ResNets": _planned_3x3(),
    }
    for name, layers in groups.items():
        counts = [
            f"batch {batch} {sum(one.over_library >= GOAL_3X3[0] for one in found)} and "
            f"{sum(one.over_dense >= GOAL_3X3[1] for one in found)} of {len(found)}"
            for batch, found in layers.items()
        ]
        notes.append(
            f"- 3x3 layers of stride 1 that are at least {GOAL_3X3[0]:g}x as fast as cuDNN, and {GOAL_3X3[1]:g}x as "
            f"fast as the same kernel with all weights ({name}): {', '.join(counts)}."
        )
    heads = ["over the best dense (goal)", *(f"batch {batch}" for batch in (1, 8, 32, 256))]
    return f"{table(heads, rows)}\n\n" + "\n".join(map(prose, notes))


def resnet50_speed() -> str:
    """How fast the compiled network of the ResNet-50 tutorial is."""
    ms, rows = times(), []
    for network, batch in networks_and_batches():
        if network == "resnet50":
            dense, ours = best_dense(network, batch), ms[network, batch, "halve"]
            rows.append([f"{batch}", f"{dense:.3f}", f"{ours:.3f}", f"{dense / ours:.2f}x"])
    records = [r for r in recorded("benchmarks/results/gpu.json") if r["network"] == "resnet50"]
    heads = ["batch", "best dense, ms", "halve, ms", "speed-up"]
    return f"{table(heads, rows)}\n\n{measured_on(records)}; {records[0]['dtype']}, 224 px."


class Split(NamedTuple):
    """A speed-up over the best dense version as a product."""

    kernels: float  # of our kernels with all weights
    sparsity: float  # of the same kernels with half of the weights, where that is faster


def _split() -> dict[tuple[str, int], Split]:
    """The speed-ups of networks that run on our kernels throughout.

    Not of others: Inductor compiles the rest of the network in halve, but not in our dense version.
    """
    ms, found = times(), {}
    for network, batch in speedups(main=True):
        dense, ours = ms.get((network, batch, "halve_dense")), ms[network, batch, "halve"]
        best = best_dense(network, batch)
        if network.startswith("resnet") and dense and best:
            found[network, batch] = Split(best / dense, dense / ours)
    return found


class Sparsity(NamedTuple):
    """What sparse kernels gain in a network."""

    ratio: float
    sparse: int  # layers that run sparse
    able: int  # layers that could


def _sparsity(network: str, batch: int) -> Sparsity:
    """By the times of layers: how much longer the network would take with the fastest dense kernel in each of them."""
    layers = [
        r
        for r in recorded("benchmarks/results/gpu_layers.json")
        if (r["network"], r["batch"]) == (network, batch) and r["sparse_ms"] is not None
    ]
    sparse = [r for r in layers if r["sparse"]]
    ours = times()[network, batch, "halve"]
    saved = sum(min(r["dense_ms"], r["our_dense_ms"] or r["dense_ms"]) - r["sparse_ms"] for r in sparse)
    return Sparsity((ours + saved) / ours, len(sparse), len(layers))


class Layer3x3(NamedTuple):
    """A 3x3 layer of stride 1: milliseconds of the library, and of our kernel with all weights and with half."""

    name: str
    batch: int
    library: float
    dense: float
    sparse: float

    @property
    def over_library(self) -> float:
        return self.library / self.sparse

    @property
    def over_dense(self) -> float:
        return self.dense / self.sparse


def _conv3x3() -> list[Layer3x3]:
    """The layers of conv3x3.json, the fastest tile of each kernel."""
    found = []
    for record in recorded("benchmarks/results/conv3x3.json"):
        kinds = ("cudnn", "wgmma ", "wgmma_sp ")
        fastest = (min(ms for name, ms in record["median_ms"].items() if name.startswith(kind)) for kind in kinds)
        found.append(Layer3x3(f"{record['layer']} px, batch {record['batch']}", record["batch"], *fastest))
    return found


def _planned_3x3() -> dict[int, list[Layer3x3]]:
    """The layers of ResNets in gpu_layers.json, by batch size."""
    records = [
        r
        for r in recorded("benchmarks/results/gpu_layers.json")
        if r["network"].startswith("resnet") and re.match(r"\d+>\d+ 3x3 at ", r["shape"]) and r["sparse_ms"] is not None
    ]
    return _by_batch(
        Layer3x3(r["layer"], r["batch"], r["dense_ms"], r["our_dense_ms"], r["sparse_ms"]) for r in records
    )


def _by_batch(layers: Iterable[Layer3x3]) -> dict[int, list[Layer3x3]]:
    found: dict[int, list[Layer3x3]] = {}
    for layer in layers:
        found.setdefault(layer.batch, []).append(layer)
    return dict(sorted(found.items()))


def _batches() -> list[int]:
    return sorted({batch for _, batch in networks_and_batches()})


def _networks(main: bool) -> str:
    return _listed([*dict.fromkeys(name_of(network) for network, _ in speedups(main))])


def _others() -> str:
    """The speed of networks that are not in the README's table. Those that gain little are named."""
    found = speedups(main=False)
    large = [ratio for ratio in found.values() if ratio >= SMALL]
    small = {pair: ratio for pair, ratio in found.items() if ratio < SMALL}
    words = [f"{span(large)}x"] if large else []
    words += [f"only {span(small.values())}x on {_at_batches(small)}"] if small else []
    return f"Other networks ({len({network for network, _ in found})}): {', but '.join(words)}."


def _small() -> str:
    """Where gains are small."""
    found = {pair: ratio for pair, ratio in speedups(main=False).items() if ratio < SMALL}
    return f"Gains are small on {_at_batches(found)}: {span(found.values())}x. " if found else ""


def _at_batches(pairs: Iterable[tuple[str, int]]) -> str:
    """Networks with their batch sizes.

    >>> _at_batches([("swin_t", 1), ("swin_t", 8), ("vit_b_16", 1)])
    'Swin-T (batches 1 and 8) and ViT-B/16 (batch 1)'
    """
    batches: dict[str, list[str]] = {}
    for network, batch in pairs:
        batches.setdefault(name_of(network), []).append(str(batch))
    return _listed(
        [f"{name} ({'batches' if len(found) > 1 else 'batch'} {_listed(found)})" for name, found in batches.items()]
    )


def _dense_plans() -> str:
    """Which networks run no layer sparse."""
    pairs = [pair for main in (True, False) for pair in speedups(main) if not _sparsity(*pair).sparse]
    return f"The plan has no sparse layer on {_at_batches(pairs)}." if pairs else "Every plan has sparse layers."


def _millijoules() -> dict[tuple[str, int, str], float]:
    records = recorded("benchmarks/results/gpu.json")
    return {(r["network"], r["batch"], r["system"]): r["energy_mj_per_image"] for r in records if _has_energy(r)}


def _has_energy(record: dict[str, Any]) -> bool:
    return bool(record.get("energy_mj_per_image"))


def _energy() -> str:
    """Energy of the best dense version over that of halve."""
    joules, found = _millijoules(), {}
    for network, batch in networks_and_batches():
        dense, ours = (joules.get((network, batch, s)) for s in (fastest_dense(network, batch) or "", "halve"))
        if dense and ours:
            found[network, batch] = dense / ours
    more = {pair: ratio for pair, ratio in found.items() if ratio < 1}
    less = [ratio for ratio in found.values() if ratio >= 1]
    words = f"The best dense version takes {span(less)} times the energy per image"
    return f"{words}, but {span(more.values())} times on {_at_batches(more)}." if more else f"{words}."


def _of(count: int, total: int) -> str:
    return f"all {total}" if count == total else f"{count} of {total}"


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
