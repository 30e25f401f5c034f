"""Model, masks and an example -> a network that runs fast (see compiled.py)."""

from typing import Any

import torch
from torch import Tensor, nn

from halve.engine.compiled import Compiled, missing
from halve.engine.fuse import fuse
from halve.engine.guards import Guards
from halve.engine.lower import lower_
from halve.engine.parts import CapturedPart
from halve.engine.recorded import ALONE
from halve.engine.trial import tried
from halve.errors import EngineError, ModelError
from halve.graph import Captured, capture
from halve.masks.apply import Changed, apply
from halve.masks.mask import MaskSet


def compile(
    model: nn.Module,
    masks: MaskSet,
    example: Tensor | tuple[Tensor, ...],
    *,
    dtype: torch.dtype | None = None,
    batch_sizes: tuple[int, ...] = (),
    changed: Changed = "warn",
    like: Compiled | None = None,
) -> Compiled:
    """The masked model as a module for inference that runs on sparse kernels where these are faster.

    The example (images, or a tuple of inputs) says what inputs will look like: their device, type, and number of
    dimensions. `dtype` is what is computed in, by default the example's type: float16 or bfloat16 for sparse kernels,
    and the outputs come in the example's type again. Batch sizes and, where the model allows it, image sizes are free;
    the example's batch size and `batch_sizes` are timed and recorded now, see `Compiled.warmup`.

    BatchNorm is folded; bias, activation and residual run inside of the layer; what is not understood runs as it was.
    `like` is a compiled network of the same structure, whose plan is taken over: an updated checkpoint under the same
    masks is packed and recorded, and nothing is timed again.

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
    floating = [x.dtype for x in inputs if x.is_floating_point()]
    computed = dtype or (floating[0] if floating else torch.float32)
    if not computed.is_floating_point:
        raise EngineError(f"dtype={computed}: networks are computed in float16, bfloat16 or float32")
    with ALONE, torch.no_grad():  # what one thread records, the work of another may spoil
        fast = _compiled(model, masks, inputs, computed, changed)
        reason = missing(inputs[0].device, computed)
        if reason is None and not any(way.startswith("sparse") for layer in fast.layers for way in layer.possible()):
            reason = "no layer that was captured is 2:4 along its input channels, in blocks of four"
        if reason is not None:
            fast.fall_back(reason)
        elif like is not None:
            fast.take_plan_of(like)
        return fast.warmup([len(inputs[0]), *batch_sizes, *fast.plan.batches])


def _compiled(
    model: nn.Module, masks: MaskSet, inputs: tuple[Tensor, ...], dtype: torch.dtype, changed: Changed
) -> Compiled:
    """Captured, fused and converted, with every layer dense; it runs on the example."""
    name = type(model).__name__
    exact = torch.float64 if dtype == torch.float64 else torch.float32  # what is folded and fused in
    masked = apply(model, masks, permute=bool(masks.moves), changed=changed).eval().to(inputs[0].device, exact)
    captured = _captured(masked, tuple(_in(exact, x) for x in inputs))
    body, left = _body(masked, captured)
    if captured.whole:
        part, two = captured.parts[0], tuple(_in(exact, torch.cat([x, x])[:2]) for x in inputs)
        held = tried(body, masked, part.sizes(), Guards.of(part.program, masked.forward), two, {})
    _convert_(body, dtype)
    fast = Compiled(body, inputs, dtype, left)
    if captured.parts:
        left |= _not_taken(model, masks, {layer.name for layer in fast.layers}, left)
    if captured.whole:
        fast.hold_for(*held)
    try:
        fast.check_sizes(inputs)
    except EngineError as error:
        raise ModelError(f"{name} is captured with two images, and that does not hold for all: {error}") from error
    try:
        fast(*inputs)
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


def _captured(masked: nn.Module, inputs: tuple[Tensor, ...]) -> Captured:
    """With images of any size where the conditions that this takes can be understood; in no parts where none can be."""
    try:
        captured = capture(masked, inputs, free_size=True)
    except ModelError as error:
        return Captured((), {"the network": str(error)})
    if captured.whole:
        program = captured.parts[0].program
        if not Guards.told(program) or Guards.of(program, masked.forward).broken(inputs):
            return capture(masked, inputs)
    return captured


def _body(masked: nn.Module, captured: Captured) -> tuple[nn.Module, dict[str, str]]:
    """The network with its captured parts fused, and what is left as it was."""
    left = dict(captured.left)
    body: nn.Module = masked
    for part in captured.parts:
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
            result[name] = f"{type(model.get_submodule(name)).__name__}, which the engine has no operation for"
    return result


def _convert_(body: nn.Module, dtype: torch.dtype) -> None:
    """To a type; biases that are added in single precision stay exact."""
    exact = [(module, module.bias32) for module in body.modules() if getattr(module, "bias32", None) is not None]
    body.to(dtype)
    for layer, bias in exact:
        layer.bias32 = bias


def _in(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
