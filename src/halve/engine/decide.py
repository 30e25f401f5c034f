"""Choose the kernels with which the network is fastest, and say why."""

from collections.abc import Callable, Sequence

import torch

from halve.batches import Progress
from halve.engine.kernels.cuda import jit
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import family_of
from halve.engine.layer import Layer
from halve.engine.layer_times import LayerTimes, candidate_kernels, time_layers
from halve.engine.plan import Entry
from halve.engine.timing import measure, ran_out_of_memory
from halve.engine.timing_cache import TimingCache, kernel_id

THRESHOLDS = (1.0, 0.8, 0.6)  # relative to dense speed: above each of these, our kernels are tried in the whole network
_MIN_SHARE, _MAX_RATIO, _MAX_TRIED = 0.02, 1.25, 6  # of kernels tried in the network one layer at a time: see `_others`
_CHOSEN = "chosen"  # the name of a combination of kernels
_GAIN = 0.005  # of the network's time, by which another kernel must be faster to be taken


def decide(
    layers: Sequence[Layer],
    run: Callable[[], object],
    cache: TimingCache,
    device: torch.device,
    *,
    key: str | None = None,
    sparse: bool = True,
    progress: Progress = False,
) -> list[Entry]:
    """Choose a kernel for every layer, for the input that `run` uses.

    Layers are timed first, then the network with several combinations of kernels, and on a GPU with other kernels for
    one layer at a time: the fastest kernel of a layer alone may not be the fastest between its neighbours.

    Args:
        layers: the layers of the network.
        run: runs the network.
        cache: earlier timings.
        device: where the network runs.
        key: cache key of the network (see `timing_cache.network_key`). Default: do not cache network times.
        sparse: False restricts the choice to library kernels.
        progress: how to show the progress of timing. Default: not at all.
    """
    if not any(len(candidate_kernels(layer, device, sparse)) > 1 for layer in layers):
        return []
    timed = time_layers(layers, run, cache, device, sparse, progress)
    if not timed:
        return []
    candidates = {"dense": [layer.best_dense for layer in timed]}
    for threshold in THRESHOLDS:
        chosen = [layer.ours_above(threshold) for layer in timed]
        if chosen not in candidates.values():
            candidates[f"above {threshold:g} x dense"] = chosen
    times = _network_times(candidates, timed, run, cache, device, key)
    best = min(times, key=times.__getitem__)
    chosen = candidates[best]
    if device.type == "cuda":
        chosen = _in_context(chosen, timed, run, cache, device, key)
    for layer, kernel in zip(timed, chosen, strict=True):
        layer.layer.use({**layer.layer.kernels, layer.size: kernel})
    return [
        layer.entry(kernel, _reason(layer, kernel, best, kernel != first))
        for layer, kernel, first in zip(timed, chosen, candidates[best], strict=True)
    ]


def _network_times(
    candidates: dict[str, list[Kernel]],
    timed: list[LayerTimes],
    run: Callable[[], object],
    cache: TimingCache,
    device: torch.device,
    key: str | None,
) -> dict[str, float]:
    """Milliseconds of the network with each combination of kernels, measured or from the cache.

    Layers hold the packed tensors of all these kernels afterwards, and still those that other input sizes use.
    """

    def on(kernels: list[Kernel]) -> Callable[[], object]:
        def call() -> object:
            for layer, kernel in zip(timed, kernels, strict=True):
                layer.layer.kernels = {layer.size: kernel}
            return run()

        return call

    def measured() -> dict[str, float]:
        before = [layer.layer.kernels for layer in timed]
        try:
            for layer, kernels in zip(timed, zip(*candidates.values(), strict=True), strict=True):
                layer.layer.hold([*layer.layer.kernels.values(), *kernels])
            return measure({name: on(kernels) for name, kernels in candidates.items()}, device)
        finally:  # recordings of other input sizes read the packed tensors that these kernels need
            for layer, used in zip(timed, before, strict=True):
                layer.layer.kernels = used

    ids = {name: jit.digest(*map(kernel_id, kernels)) for name, kernels in candidates.items()}
    times = cache.look_up(key, ids, measured)
    cache.save()
    return times


def _in_context(
    chosen: list[Kernel],
    timed: list[LayerTimes],
    run: Callable[[], object],
    cache: TimingCache,
    device: torch.device,
    key: str | None,
) -> list[Kernel]:
    """These kernels, or others with which the network is faster, tried for one layer at a time and then together.

    A layer that is timed alone finds its weights in the cache of the GPU, and kernels like its own before and after it.
    Both measurements have keys of their own in the timing cache: times of different measurements do not compare.
    """
    trials = {f"{places} {kernel}": kernels for (places, kernel), kernels in _others(chosen, timed).items()}
    if not trials:
        return chosen
    try:
        times = _network_times({**trials, _CHOSEN: chosen}, timed, run, cache, device, key and f"{key} one by one")
        limit = (1 - _GAIN) * times[_CHOSEN]
        faster = sorted((name for name in trials if times[name] < limit), key=times.__getitem__)
        if not faster:
            return chosen
        together = list(chosen)
        for name in reversed(faster):  # the fastest kernel of a layer comes last
            changes = zip(trials[name], chosen, together, strict=True)
            together = [new if new != old else now for new, old, now in changes]
        last = {_CHOSEN: chosen, "the fastest one": trials[faster[0]], "together": together}
        times = _network_times(last, timed, run, cache, device, key and f"{key} together")
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        return chosen  # many networks are recorded at once, and there is a plan already
    return last[min(last, key=times.__getitem__)]


def _others(chosen: list[Kernel], timed: list[LayerTimes]) -> dict[tuple[tuple[int, ...], Kernel], list[Kernel]]:
    """Combinations with another of our kernels for all equal layers, by the places of these layers and the kernel.

    Only for layers that take a good part of the time, and with kernels that are not much slower alone.
    """
    equal: dict[object, list[int]] = {}
    for place, (layer, kernel) in enumerate(zip(timed, chosen, strict=True)):
        if kernel in layer.times:
            equal.setdefault((layer.shape, kernel, frozenset(layer.times.items())), []).append(place)
    total = sum(layer.times.get(kernel, 0.0) for layer, kernel in zip(timed, chosen, strict=True))
    found = {}
    for places in equal.values():
        times, kernel = timed[places[0]].times, chosen[places[0]]
        if len(places) * times[kernel] < _MIN_SHARE * total:
            continue
        ours = (other for other in times if other != kernel and not family_of(other).library)
        near = sorted((other for other in ours if times[other] <= _MAX_RATIO * times[kernel]), key=times.__getitem__)
        for other in near[:_MAX_TRIED]:
            found[tuple(places), other] = [other if place in places else k for place, k in enumerate(chosen)]
    return found


def _reason(layer: LayerTimes, kernel: Kernel, chosen: str, in_context: bool) -> str:
    if in_context:
        reason = "the network is faster with this kernel"
    elif kernel == layer.best:
        reason = "fastest"
    elif family_of(kernel).library:
        reason = "the network is faster with this layer dense"
    else:
        reason = f"the network is faster with our kernels {chosen}"
    return reason if layer.layer.is_2_4 or not layer.layer.has_weight else f"{reason}, not 2:4"
