"""Layers: their kind and their weight, including weights computed by a parametrization or a hook.

Only `set_weight_` and `plain_weight_` write to the module they are given. They are meant for copies.
"""

import contextlib
import copy
import inspect
import types
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from halve.errors import ModelError, first_line, listed

Kind = Literal["linear", "conv", "conv_transpose"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_WHY_COPY = "halve works on a copy so that your model is never changed"
_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile; any other model is returned as it is.

    Raises `ModelError` for what is not a model.

    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> unwrapped(nn.DataParallel(torch.compile(model))) is model
    True
    """
    while True:
        if not isinstance(model, nn.Module):
            raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inner := model._modules.get("_orig_mod")) is not None:  # importing torch.compile's class takes a second
            model = inner
        else:
            return model


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters; the CPU if it has none.

    >>> device_of(nn.Linear(2, 2, device="meta")), device_of(nn.ReLU())
    (device(type='meta'), device(type='cpu'))
    """
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def kind_of(module: nn.Module) -> Kind | None:
    """'linear', 'conv' or 'conv_transpose'; None for any other module.

    >>> kind_of(nn.Conv3d(4, 4, 3)), kind_of(nn.ReLU())
    ('conv', None)
    """
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _CONV):
        return "conv"
    return "conv_transpose" if isinstance(module, _TRANSPOSED) else None


def has_weight(module: nn.Module) -> bool:
    """Whether the layer has a weight, stored or computed. Some layers are built without one."""
    return parametrize.is_parametrized(module, "weight") or getattr(module, "weight", None) is not None


def weight_name(layer: str) -> str:
    """The state-dict name of a layer's weight.

    >>> weight_name("layer1.conv"), weight_name("")  # the model itself is a layer
    ('layer1.conv.weight', 'weight')
    """
    return f"{layer}.weight".lstrip(".")


def weight_of(module: nn.Module) -> Tensor:
    """The weight the layer multiplies by, detached.

    Parametrizations are evaluated in eval mode: in training mode, reading the weight under spectral norm would update
    its buffers.
    """
    with torch.no_grad():
        if parametrize.is_parametrized(module, "weight"):
            parts = list(_parametrizations(module).modules())
            modes = [part.training for part in parts]
            try:
                for part in parts:
                    part.training = False
                weight = module.weight
            finally:
                for part, mode in zip(parts, modes, strict=True):
                    part.training = mode
        elif (hook := _weight_hook(module)) is not None:
            if isinstance(hook, SpectralNorm):
                weight = hook.compute_weight(module, do_power_iteration=False)
            elif isinstance(hook, WeightNorm):
                weight = hook.compute_weight(module)
            else:
                weight = hook.apply_mask(module)
        else:
            weight = cast(Tensor, getattr(module, "weight", None))
    if not isinstance(weight, Tensor):
        raise ModelError(f"{type(module).__name__} has no weight tensor")
    return weight.detach()


def weight_sources(module: nn.Module) -> frozenset[str]:
    """Names of the module's tensors that its weight is computed from; empty for a plain weight.

    >>> sorted(weight_sources(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
    ['parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    if parametrize.is_parametrized(module, "weight"):
        parts = _parametrizations(module)
        names = [name for name, _ in (*parts.named_parameters(), *parts.named_buffers())]
        return frozenset(f"parametrizations.weight.{name}" for name in names)
    if _weight_hook(module) is None:
        return frozenset()
    return frozenset({"weight_g", "weight_v", "weight_u", "weight_orig", "weight_mask"})


def weight_key(module: nn.Module) -> int:
    """A key that is equal for layers that share one weight."""
    if parametrize.is_parametrized(module, "weight"):
        return id(next(_parametrizations(module).parameters()))
    own = {**module._parameters, **module.__dict__}
    return id(next((own[name] for name in ("weight", "weight_orig", "weight_v") if own.get(name) is not None), module))


def set_weight_(module: nn.Module, value: Tensor) -> None:
    """Replace the layer's weight by a plain one, removing any parametrization or hook that computed it."""
    trained = None
    if parametrize.is_parametrized(module, "weight"):
        trained = any(p.requires_grad for p in _parametrizations(module).parameters())
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    elif (hook := _weight_hook(module)) is not None:
        own = [p for name, p in module._parameters.items() if name.startswith("weight_") and p is not None]
        trained = any(p.requires_grad for p in own)
        if isinstance(hook, SpectralNorm):
            remove_spectral_norm(module)
        elif isinstance(hook, WeightNorm):
            remove_weight_norm(module)
        else:
            cast(Any, prune).remove(module, "weight")
    if trained is not None:  # torch leaves a parameter or a buffer, with or without requires_grad
        del module.weight
        module.register_parameter("weight", nn.Parameter(value.clone(), requires_grad=trained))
        return
    with torch.no_grad():
        cast(Tensor, module.weight).copy_(value)


def plain_weight_(module: nn.Module) -> None:
    """Replace a computed weight by its current value, as a plain parameter."""
    set_weight_(module, weight_of(module))


def clone(model: nn.Module) -> nn.Module:
    """A deep copy that shares no tensor with the model. Tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and not value.is_leaf:  # left by old-style hooks; deepcopy refuses them
                memo[id(value)] = value.detach().clone()
    try:
        result = copy.deepcopy(model, memo)
    except Exception as error:  # a model may hold anything, and deepcopy raises whatever that raises
        check_initialised(model)
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}); {_WHY_COPY}: "
            f"remove what copy.deepcopy(model) fails on"
        ) from error
    for module in result.modules():
        if _is_compiled_forward(module.__dict__.get("forward"), module):
            del module.__dict__["forward"]  # it would run the original
    _check_apart(model, result)
    for module in result.modules():
        if parametrize.is_parametrized(module):  # torch gives it a private class, which deepcopy would share
            kind = type(module)
            body = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
            module.__class__ = type(kind.__name__, kind.__bases__, body)
    return result


def check_initialised(model: nn.Module) -> None:
    """Raise `ModelError` if a lazy layer of the model has no weights yet."""
    lazy = [
        name
        for name, module in model.named_modules()
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
    if lazy:
        raise ModelError(
            f"{type(model).__name__} has lazy layers that are not initialised yet: {listed(lazy)}; "
            f"run the model on a batch first, which gives them their weights"
        )


def _check_apart(model: nn.Module, copied: nn.Module) -> None:
    """Raise if the copy still runs, reads or writes parts of the original."""
    own = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if shared := [own[id(module)] or type(model).__name__ for module in copied.modules() if id(module) in own]:
        raise ModelError(
            f"copy.deepcopy of {type(model).__name__} returns modules of the original: {listed(shared)}; {_WHY_COPY}"
        )
    if any(id(tensor) in tensors for tensor in (*copied.parameters(), *copied.buffers())):
        raise ModelError(f"copy.deepcopy of {type(model).__name__} returns tensors of the original; {_WHY_COPY}")
    for name, module in copied.named_modules():
        for attribute, value in module.__dict__.items():
            if isinstance(value, types.FunctionType) and any(id(part) in own for part in _closed_over(value)):
                raise ModelError(
                    f"{name or type(model).__name__}.{attribute} is a function that holds layers of the model, so a "
                    f"copy would run the original's layers; {_WHY_COPY}: make it a method, or call them in forward"
                )


def _closed_over(function: types.FunctionType) -> list[Any]:
    """Objects that a function holds in its closure and defaults; for bound methods, their instances."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [getattr(value, "__self__", value) for value in (*values, inspect.unwrap(function))]


def _is_compiled_forward(function: Any, module: nn.Module) -> bool:
    """Whether the function is the class's own forward under torch.compile."""
    compiled = hasattr(function, "_torchdynamo_orig_callable")
    return compiled and getattr(inspect.unwrap(function), "__func__", None) is type(module).forward


def runs_torch_forward(module: nn.Module) -> bool:
    """Whether the layer runs PyTorch's own forward, not one that a subclass overrides."""
    plain = next(base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules"))
    return all(getattr(type(module), f, None) is getattr(plain, f, None) for f in ("forward", "_conv_forward"))


def zeros_stay_zero(module: nn.Module) -> bool:
    """Whether zero weights still contribute nothing when the layer runs.

    PyTorch's own layers multiply by their weight unchanged. A subclass that overrides forward may transform it first:
    weight standardisation, for example, turns zeros into other values. Such layers are tested on a synthetic input.
    """
    if runs_torch_forward(module):
        return True
    probe = clone(module).eval().float().cpu()
    channels = int(getattr(probe, "in_channels", 0) or getattr(probe, "in_features", 0))
    extent = [
        2 * size * step
        for size, step in zip(getattr(probe, "kernel_size", ()), getattr(probe, "dilation", ()), strict=True)
    ]
    with torch.no_grad():
        weight = weight_of(probe).clone()
        (weight[0] if kind_of(probe) == "conv_transpose" else weight[:, 0]).zero_()
        image = torch.linspace(-1, 1, steps=channels).reshape(1, channels, *[1] * len(extent)).repeat(1, 1, *extent)
        other = image.clone()
        other[:, 0] += 1
        try:
            set_weight_(probe, weight)
            results = [probe(x) for x in (image, other)]
        except Exception:  # user code on a synthetic input may raise anything
            return False
    return torch.equal(*results)


def _parametrizations(module: nn.Module) -> nn.Module:
    return cast(nn.ModuleDict, module.parametrizations)["weight"]


def _weight_hook(module: nn.Module) -> Any:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm) and hook.name == "weight":
            return hook
        if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == "weight":
            return hook
    return None


def convert_(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Convert floating-point parameters and buffers; integers and complex numbers keep their dtype. For copies only."""
    module._apply(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype))
