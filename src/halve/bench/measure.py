"""`halve.measure`: time every layer of a network with dense and with sparse kernels, to see where a mask pays."""

import torch
from torch import Tensor, nn

from halve.batches import Progress
from halve.bench.bench import bench
from halve.bench.records import versions
from halve.engine.plan import Entry
from halve.errors import EngineError, EngineWarning, OptionError, warn
from halve.machine import device_name
from halve.modules import unwrapped, weight_of
from halve.process_state import preserved_process_state
from halve.prune.prune import prune
from halve.select.speed_plan import LayerSpeed, SpeedPlan

_DENSE = {"cuda": ("best_dense", "compile_freezing"), "cpu": ("eager", "compile_freezing")}


@preserved_process_state()
def measure(
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    *,
    dtype: torch.dtype | None = None,
    seconds: float = 0.5,
    progress: Progress = True,
) -> SpeedPlan:
    """Time every layer of a network with dense and with sparse kernels on the device of the example.

    Times do not depend on which weights are kept, so no masks are needed. `halve.learn(..., plan=plan)` masks only the
    layers where that pays (`plan.paying`): they are faster sparse, and save enough for their weights. The whole network
    is timed dense, and compiled by halve with and without masks, which tells what masks add: `plan.verdict`. The model
    is not changed.

    Args:
        model: The dense model.
        example: Images, or a tuple of inputs, in the batch size to measure.
        dtype: What is computed in. Default: float16 on a GPU, float32 on a CPU.
        seconds: Time spent on each version of the network, not counting compilation.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.

    >>> import halve, warnings
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    >>> with warnings.catch_warnings(action="ignore"):  # a CPU may have no sparse kernels
    ...     plan = halve.measure(model, torch.randn(2, 3, 16, 16), seconds=0.01)
    >>> list(plan), plan.batch, plan["2"].weight
    (['2'], 2, (8, 8, 3, 3))
    """
    model = unwrapped(model)
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(x, Tensor) and x.dim() and len(x) for x in inputs):
        raise OptionError("example must be a tensor of images, or a tuple of tensors, as the model takes them")
    device, batch = inputs[0].device, len(inputs[0])
    computed = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    masks = prune(model, progress=False)
    found = bench(
        *(model, masks, inputs),
        batch_sizes=[batch],
        dtype=computed,
        systems=[*_DENSE.get(device.type, ("eager",)), "halve_unmasked", "halve"],
        seconds=seconds,
        progress=progress,
    )
    ours = found[-1]
    entries = {entry.layer: entry for entry in ours.plan}  # compiling again for its plan would take up to minutes
    if ours.note is not None:
        warn(ours.note, EngineWarning)
    times = {one.system: one.median_ms for one in found if one.median_ms is not None}
    sparse_ms, unmasked_ms = times.pop("halve", None), times.pop("halve_unmasked", None)
    if sparse_ms is None or unmasked_ms is None or not times:
        errors = "; ".join(f"{one.system}: {one.error}" for one in found if one.error)
        raise EngineError(f"the network could not be timed: {errors}")
    layers = {name: _speed(tuple(weight_of(model.get_submodule(name)).shape), entries.get(name)) for name in masks}
    return SpeedPlan(
        layers,
        device_name(device),
        str(computed).removeprefix("torch."),
        batch,
        tuple(inputs[0].shape[1:]),
        min(times.values()),
        unmasked_ms,
        sparse_ms,
        versions(),
    )


def _speed(weight: tuple[int, ...], entry: Entry | None) -> LayerSpeed:
    if entry is None:
        return LayerSpeed(weight, "", None, None)
    dense = [time for time in (entry.dense_ms, entry.our_dense_ms) if time is not None]
    return LayerSpeed(weight, entry.shape, min(dense, default=None), entry.sparse_ms)
