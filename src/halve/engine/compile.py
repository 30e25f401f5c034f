"""`halve.compile`: capture, fuse and plan a masked model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.batches import Images, Progress, check_readable, images_of, tracked
from halve.engine.capture.equivalence import checked
from halve.engine.capture.guards import Guards
from halve.engine.capture.partial import CapturedPart, around_parts, captured_parts, replace_parts_
from halve.engine.capture.purity import impurity, preserved_buffers
from halve.engine.compiled import SPARSE, Compiled
from halve.engine.fuse import fuse
from halve.engine.kernels.registry import no_sparse_kernels
from halve.engine.layer import Layer
from halve.engine.recorded import CAPTURE_LOCK
from halve.errors import EngineError, EngineWarning, ModelError, OptionError, warn
from halve.graph import Captured, capture
from halve.masks.apply import OnChanged, apply
from halve.masks.mask import MaskSet
from halve.modules import check_initialised, convert_, unwrapped
from halve.process_state import preserved_process_state

NETWORK = "the network"  # its name in `Plan.uncompiled`


@preserved_process_state()
@torch.inference_mode(False)  # its weights would be read-only outside of it
def compile(
    model: nn.Module,
    masks: MaskSet | None,
    example: Any,
    *,
    dtype: torch.dtype | None = None,
    batch_sizes: Sequence[int] = (),
    any_size: bool = False,
    on_changed: OnChanged = "warn",
    plan_from: Compiled | None = None,
    inductor: bool | None = None,
    progress: Progress = True,
) -> Compiled:
    """Compile the masked model for inference: sparse kernels run where they are faster than dense ones.

    BatchNorm is folded, and bias, activation and residual are fused into the layers. Each layer is timed on the
    example's device with every kernel that can run it, and uses the fastest. What cannot be compiled falls back to
    eager, and what cannot run sparse runs dense with a warning that says why. The model is not changed.

    Args:
        model: the dense model.
        masks: from `halve.learn`, `halve.prune` or `halve.load`. None keeps all weights: the network is only fused, and
            runs on the fastest dense kernels, halve's or PyTorch's.
        example: images, a tuple of inputs, or a batch such as (images, targets). Sets the device, dtype and shape of
            inputs; the batch size may vary. A list of images, as detectors take it, may have any sizes: the network is
            compiled in parts then, and the code between them stays eager, in single precision.
        dtype: what is computed in: float16 or bfloat16 for sparse tensor cores. Default: the example's dtype. Outputs
            have the example's dtype.
        batch_sizes: batch sizes to plan and record now, besides the example's (see `Compiled.warmup`).
        any_size: accept other image sizes than the example's, if the model does. Capturing takes longer.
        on_changed: what to do if the weights are not those the masks were made for: "warn", "error" or "ignore".
        plan_from: a compiled network with the same layers, whose plan is reused instead of timing kernels again. For
            updated checkpoints under the same masks.
        inductor: let Inductor, PyTorch's compiler, compile the operations between the layers where that is faster.
            Planning takes longer, by up to minutes for each batch size. Default: on GPUs, and on CPUs if there is a
            C++ compiler.
        progress: show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.

    Returns:
        A module that replaces the model. Its `plan` says which kernel each layer uses, and why.

    >>> import halve, warnings
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> images = torch.randn(2, 4, 8, 8)
    >>> masks = halve.prune(model)
    >>> with warnings.catch_warnings(action="ignore"):  # on a CPU: folded and fused, dense
    ...     fast = halve.compile(model, masks, images)
    >>> torch.allclose(fast(images), halve.apply(model, masks)(images), atol=1e-5)
    True
    """
    model = unwrapped(model)
    inputs = _inputs(example)
    _check_example(model, inputs)
    masks = MaskSet({}) if masks is None else masks
    _check_options(masks, dtype, batch_sizes, plan_from)
    floating = [x.dtype for x in pytree.tree_leaves(inputs) if x.is_floating_point()]
    computed = dtype or (floating[0] if floating else torch.float32)
    if not computed.is_floating_point:
        raise OptionError(f"dtype must be a floating-point type such as torch.float16, got {computed}")
    with CAPTURE_LOCK, torch.no_grad():
        [fast] = (
            _compiled(model, masks, given, computed, any_size, on_changed, inductor)
            for given in tracked([inputs], progress, "capturing the network")
        )
        reason = no_sparse_kernels(fast.device, computed)
        if reason is None and len(masks) and not any(layer.sparse_kernels(fast.device) for layer in fast.layers):
            why = "no captured layer is 2:4 along its input channels, in blocks of four"
            fast.plan.uncompiled = {**fast.plan.uncompiled, SPARSE: f"not used: {why}"}
            warn(f"no layer runs sparse: {why}", EngineWarning)
        if reason is not None:
            fast.fall_back(reason, expected=not len(masks))
        elif plan_from is not None:
            fast.use_plan_of(plan_from)
        return fast.warmup([len(inputs[0]), *batch_sizes, *fast.plan.batches, *fast.plan.inductor], progress)


@dataclass
class _Body:
    """What a compiled network runs: a graph with its guards, or the model itself with some or no modules captured."""

    module: nn.Module
    guards: Guards | None = None
    uncompiled: dict[str, str] = field(default_factory=dict)
    parts: dict[str, CapturedPart] = field(default_factory=dict)
    changes_itself: bool = False


def _compiled(
    model: nn.Module,
    masks: MaskSet,
    inputs: tuple[Images, ...],
    dtype: torch.dtype,
    any_size: bool,
    on_changed: OnChanged,
    inductor: bool | None,
) -> Compiled:
    """The captured, fused and converted network. Every layer still uses the fallback kernel."""
    check_initialised(model)
    exact = torch.float64 if dtype == torch.float64 else torch.float32  # BatchNorm is folded in this dtype
    masked = apply(model, masks, on_changed=on_changed).eval()
    convert_(masked, exact, pytree.tree_leaves(inputs)[0].device)
    given = pytree.tree_map(lambda x: _cast(x, exact).contiguous(), inputs)  # code that calls `view` on images needs it
    body = _body(masked, given, any_size)
    lists = any(isinstance(x, list) for x in inputs)
    _convert_(body.module, around_parts(dtype) if lists else dtype)
    for part in body.parts.values():
        _convert_(part.graph, dtype)
        part.dtype = dtype if lists else None
    if lists and NETWORK in body.uncompiled and around_parts(dtype) != dtype:
        body.uncompiled[NETWORK] += f"; what is not compiled runs in {str(around_parts(dtype)).removeprefix('torch.')}"
    replace_parts_(body.module, body.parts)
    fast = Compiled(body.module, inputs, dtype, body.uncompiled, body.guards, inductor)
    if body.changes_itself:
        fast.run_eagerly("the network changes its buffers when it runs")
    if body.guards is not None or body.parts:
        body.uncompiled |= _not_compiled(model, masks, {layer.name for layer in fast.layers}, body.uncompiled)
    _run_once(fast, inputs, type(model).__name__, dtype)
    for name, part in body.parts.items():
        if part.eager_calls is not None:
            body.uncompiled[name] = f"falls back to eager in calls with {part.eager_calls}"
    return fast


def _body(masked: nn.Module, inputs: tuple[Any, ...], any_size: bool) -> _Body:
    try:
        captured = capture(masked, inputs, any_size=any_size)
    except ModelError as error:
        return _eager(masked, inputs, str(error))
    if not captured.complete:
        return _in_parts(masked, captured, inputs)
    [part] = captured.parts
    if (reason := impurity(part)) is not None:
        return _eager(masked, inputs, reason)
    guards = Guards.of(part, masked.forward)
    if any_size and guards.broken(inputs) is not None:  # guards that cannot be parsed
        return _body(masked, inputs, any_size=False)
    module = fuse(part)
    found = checked(module, masked, guards, inputs)
    return _eager(masked, inputs, found) if isinstance(found, str) else _Body(module, found)


def _eager(masked: nn.Module, inputs: tuple[Images, ...], reason: str) -> _Body:
    body = _Body(masked, uncompiled={NETWORK: f"falls back to eager: {reason}"})
    with preserved_buffers(masked) as changes:
        _call(masked, inputs)
    body.changes_itself = changes.found
    return body


def _in_parts(masked: nn.Module, captured: Captured, inputs: tuple[Images, ...]) -> _Body:
    body = _Body(masked, uncompiled=dict(captured.uncaptured))
    with preserved_buffers(masked) as changes:
        body.parts, refused = captured_parts(masked, captured.parts, inputs)
    body.changes_itself = changes.found
    body.uncompiled |= refused
    body.uncompiled[NETWORK] = f"compiled in {len(body.parts)} parts: {captured.reason}"
    return body


def _run_once(fast: Compiled, inputs: tuple[Images, ...], name: str, dtype: torch.dtype) -> None:
    try:
        with preserved_buffers(fast.body):
            fast(*pytree.tree_map(torch.clone, inputs))
    except EngineError:
        raise
    except Exception as error:  # the model's own code, in a precision that it may not support
        if dtype == torch.float32:
            raise ModelError(f"{name} does not run on the example: {error}") from error
        raise EngineError(f"{name} does not run in {dtype} ({error}); omit dtype= or use another") from error


def _inputs(example: Any) -> tuple[Any, ...]:
    """The inputs in an example: a tuple of tensors is one, any other container a batch."""
    if isinstance(example, tuple) and all(isinstance(x, Tensor) for x in example):
        return example
    return (images_of(example) if isinstance(example, tuple | list | Mapping) else example,)


def _check_example(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    leaves = pytree.tree_leaves(inputs)
    if not leaves or not all(isinstance(x, Tensor) and x.dim() for x in leaves):
        raise OptionError(
            "example must be a tensor of images, a list of images or a tuple of tensors, as the model takes them"
        )
    for x in leaves:
        check_readable(x)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise OptionError("the model must have data: tensors on the meta device have none")
    if len({len(x) for x in inputs}) > 1 or not len(inputs[0]):
        raise OptionError(
            f"the example's inputs have shapes {[tuple(x.shape) for x in inputs]}: their first dimension must be the "
            f"same batch size, at least 1. Make inputs without a batch dimension part of the model"
        )


def _check_options(masks: Any, dtype: Any, batch_sizes: Any, plan_from: Any) -> None:
    wanted: tuple[tuple[str, Any, Any, str], ...] = (
        ("masks", masks, MaskSet, "a MaskSet, from halve.learn, halve.prune or halve.load, or None"),
        ("dtype", dtype, torch.dtype | None, "a dtype such as torch.float16"),
        ("batch_sizes", batch_sizes, Sequence, "a sequence of positive integers"),
        ("plan_from", plan_from, Compiled | None, "a network that halve.compile returned"),
    )
    for name, value, kind, words in wanted:
        if not isinstance(value, kind):
            raise OptionError(f"{name} must be {words}, got {value!r}")


def _not_compiled(model: nn.Module, masks: MaskSet, compiled: set[str], uncompiled: dict[str, str]) -> dict[str, str]:
    """Masked layers that no kernel can run, except where the reason is already known."""
    result = {}
    for name, mask in masks.items():
        known = any(name == outer or name.startswith(f"{outer}.") for outer in uncompiled)
        if not known and not compiled.intersection((name, *mask.shared_with)):
            kind = type(model.get_submodule(name)).__name__
            result[name] = f"not compiled: this {kind} did not run on the example input, or ran in an unsupported form"
    return result


def _convert_(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a body to the compute dtype. Layers keep biases in single precision."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Layer)}
    for name in layers:
        module.set_submodule(name, nn.Identity())
    convert_(module, dtype)
    for name, layer in layers.items():
        layer.cast_(dtype)
        module.set_submodule(name, layer)


def _call(net: nn.Module, inputs: tuple[Images, ...]) -> None:
    try:
        net(*pytree.tree_map(torch.clone, inputs))
    except Exception as error:  # the model's own code
        raise ModelError(f"{type(net).__name__} does not run on the example: {error}") from error


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
