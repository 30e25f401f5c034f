"""Model, masks and an example -> a network that runs fast (see compiled.py)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halve.engine.capture.equivalence import tried
from halve.engine.capture.guards import Guards, misfit
from halve.engine.capture.partial import CapturedPart
from halve.engine.capture.purity import convert_, try_, unchanged, unfit
from halve.engine.compiled import Compiled, missing
from halve.engine.fuse import fuse
from halve.engine.lower import lower_
from halve.engine.recorded import ALONE
from halve.errors import EngineError, ModelError
from halve.graph import Captured, capture
from halve.masks.apply import OnChanged, apply
from halve.masks.mask import MaskSet


def compile(
    model: nn.Module,
    masks: MaskSet,
    example: Tensor | tuple[Tensor, ...],
    *,
    dtype: torch.dtype | None = None,
    batch_sizes: tuple[int, ...] = (),
    on_changed: OnChanged = "warn",
    plan_from: Compiled | None = None,
) -> Compiled:
    """The masked model as a module for inference that runs on sparse kernels where these are faster.

    The example (images, or a tuple of inputs) says what inputs will look like: their device, type, and number of
    dimensions. `dtype` is what is computed in, by default the example's type: float16 or bfloat16 for sparse kernels,
    and the outputs come in the example's type again. Batch sizes and, where the model allows it, image sizes are free;
    the example's batch size and `batch_sizes` are timed and recorded now, see `Compiled.warmup`.

    BatchNorm is folded; bias, activation and residual run inside of the layer; what is not understood runs as it was.
    `plan_from` is a compiled network of the same structure, whose plan is taken over: an updated checkpoint under the
    same masks is packed and recorded, and nothing is timed again.

    Where nothing can run sparse the network runs dense, with a warning that says why. The model stays as it is.

    >>> import halve, warnings
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> images = torch.randn(2, 4, 8, 8)
    >>> masks = halve.prune(model)
    >>> with warnings.catch_warnings(action="ignore"):  # on a CPU: folded and fused, dense
    ...     fast = halve.compile(model, masks, images)
    >>> torch.allclose(fast(images), halve.apply(model, masks)(images), atol=1e-5)
    True
    """
    inputs = example if isinstance(example, tuple) else (example,)
    _check_example(model, inputs)
    _check_options(masks, dtype, batch_sizes, plan_from)
    floating = [x.dtype for x in inputs if x.is_floating_point()]
    computed = dtype or (floating[0] if floating else torch.float32)
    if not computed.is_floating_point:
        raise EngineError(f"dtype={computed}: networks are computed in float16, bfloat16 or float32")
    with ALONE, torch.no_grad():  # what one thread records, the work of another may spoil
        fast = _compiled(model, masks, inputs, computed, on_changed)
        reason = missing(inputs[0].device, computed)
        if reason is None and not any(way.startswith("sparse") for layer in fast.layers for way in layer.possible()):
            reason = "no layer that was captured is 2:4 along its input channels, in blocks of four"
        if reason is not None:
            fast.fall_back(reason)
        elif plan_from is not None:
            fast.take_plan_of(plan_from)
        return fast.warmup([len(inputs[0]), *batch_sizes, *fast.plan.batches])


def _compiled(
    model: nn.Module, masks: MaskSet, inputs: tuple[Tensor, ...], dtype: torch.dtype, on_changed: OnChanged
) -> Compiled:
    """Captured, fused and converted, with every layer dense; it runs on the example."""
    name = type(model).__name__
    exact = torch.float64 if dtype == torch.float64 else torch.float32  # what is folded and fused in
    masked = apply(model, masks, permute=bool(masks.moves), on_changed=on_changed).eval()
    convert_(masked, exact, inputs[0].device)
    given = tuple(_in(exact, x).contiguous() for x in inputs)  # code that looks at images as rows runs on these alone
    captured = _captured(masked, given)
    body, left = _body(masked, captured)
    if captured.whole:
        part, two = captured.parts[0], tuple(x[:2] if len(x) > 1 else torch.cat([x, x]) for x in given)
        held = tried(body, masked, part.sizes(), Guards.of(part.program, masked.forward), two, {})
        if any(misfit(x, limits) for x, limits in zip(given, held[0], strict=False)):
            captured = Captured((), {"the network": "its code treats one image otherwise than several"})
            body, left = _body(masked, captured)
    changing = not captured.whole and try_(body, given, left)
    convert_(body, dtype)
    fast = Compiled(body, inputs, dtype, left)
    if captured.whole:
        fast.hold_for(*held)
    elif changing:
        fast.run_as_it_is("the network changes itself when it runs")
    if captured.parts:
        left |= _not_taken(model, masks, {layer.name for layer in fast.layers}, left)
    try:
        with unchanged(body):
            fast(*(x.clone() for x in inputs))  # which a network may write to
    except EngineError:
        raise
    except Exception as error:  # the model's own code, in a precision that it may not be made for
        if dtype == torch.float32:
            raise ModelError(f"{name} does not run on the example: {error}") from error
        raise EngineError(f"{name} does not run in {dtype} ({error}); leave out dtype= or use another") from error
    for place, module in body.named_modules():
        if isinstance(module, CapturedPart) and module.other is not None:
            left[place] = f"runs as it was in calls with {module.other}"
    return fast


def _check_example(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not inputs or not all(isinstance(x, Tensor) and x.dim() for x in inputs):
        raise EngineError("the example must be a tensor of images, or a tuple of tensors, as the model takes them")
    if any(tensor.is_meta for tensor in (*inputs, *model.parameters(), *model.buffers())):
        raise EngineError("the example and the model must have numbers, and tensors on meta have none")
    if len({len(x) for x in inputs}) > 1 or not len(inputs[0]):
        raise EngineError(
            f"the example's inputs have shapes {[tuple(x.shape) for x in inputs]}: their first dimension must be the "
            f"same number of images, at least one; what has no such dimension belongs into the model"
        )


def _check_options(masks: Any, dtype: Any, batch_sizes: Any, plan_from: Any) -> None:
    wanted: tuple[tuple[str, Any, Any, str], ...] = (
        ("masks", masks, MaskSet, "a MaskSet, from halve.learn, halve.prune or halve.load"),
        ("dtype", dtype, torch.dtype | None, "a type such as torch.float16"),
        ("batch_sizes", batch_sizes, Sequence, "a tuple of whole numbers"),
        ("plan_from", plan_from, Compiled | None, "what halve.compile gave for a network of the same structure"),
    )
    for name, value, kind, words in wanted:
        if not isinstance(value, kind):
            raise EngineError(f"{name} must be {words}, not {value!r}")


def _captured(masked: nn.Module, inputs: tuple[Tensor, ...]) -> Captured:
    """With images of any size where the conditions that this takes can be understood; in no parts where none can be."""
    try:
        captured = capture(masked, inputs, free_size=True)
    except ModelError as error:
        return Captured((), {"the network": str(error)})
    if captured.whole:
        program = captured.parts[0].program
        if not Guards.told(program) or Guards.of(program, masked.forward).broken(inputs):
            captured = capture(masked, inputs)
    if captured.whole and (why := unfit(captured.parts[0])):
        return Captured((), {"the network": why})
    if captured.whole and (broken := Guards.of(captured.parts[0].program, masked.forward).broken(inputs)):
        return Captured((), {"the network": f"with two images it was captured for {broken}, which these do not meet"})
    return captured


def _body(masked: nn.Module, captured: Captured) -> tuple[nn.Module, dict[str, str]]:
    """The network with its captured parts fused, and what is left as it was."""
    left = dict(captured.left)
    body: nn.Module = masked
    for part in captured.parts:
        if part.name and (why := unfit(part)):
            left[part.name] = why
            continue
        module, _ = fuse(part)
        lower_(module)
        if not part.name:
            return module, left
        body.set_submodule(part.name, CapturedPart(part, module, masked.get_submodule(part.name)))
    if captured.reason:
        left["the network"] = f"in {len(captured.parts)} parts: {captured.reason}"
    return body, left


def _not_taken(model: nn.Module, masks: MaskSet, taken: set[str], left: dict[str, str]) -> dict[str, str]:
    """Masked layers that no operation of the engine stands for, outside of what is known to be left."""
    result = {}
    for name, mask in masks.items():
        outside = not any(name == whole or name.startswith(f"{whole}.") for whole in left)
        if outside and not taken.intersection((name, *mask.shared_with)):
            kind = type(model.get_submodule(name)).__name__
            result[name] = f"{kind}, which does not run on the example, or not as an operation of the engine's"
    return result


def _in(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
