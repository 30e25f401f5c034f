"""What a layer is: its kind and its weight, also where the weight is computed by a parametrization or a hook.

Nothing here writes to the model it is given, except `set_weight_`, which is for copies.
"""

import contextlib
import copy
import types
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from halve.errors import ModelError, listed

Kind = Literal["linear", "conv", "conv_transpose"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def kind_of(module: nn.Module) -> Kind | None:
    """'linear', 'conv' or 'conv_transpose'; None for every other module.

    >>> kind_of(nn.Conv3d(4, 4, 3)), kind_of(nn.ReLU())
    ('conv', None)
    """
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _CONV):
        return "conv"
    return "conv_transpose" if isinstance(module, _TRANSPOSED) else None


def has_weight(module: nn.Module) -> bool:
    """Whether the layer has a weight, however it comes about; some are built without."""
    return parametrize.is_parametrized(module, "weight") or getattr(module, "weight", None) is not None


def weight_of(module: nn.Module) -> Tensor:
    """The weight that the layer multiplies with, detached; reading it moves no buffer (spectral norm would)."""
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


def weight_key(module: nn.Module) -> int:
    """Equal for layers that share one weight."""
    if parametrize.is_parametrized(module, "weight"):
        return id(next(_parametrizations(module).parameters()))
    own = {**module._parameters, **module.__dict__}
    return id(next((own[name] for name in ("weight", "weight_orig", "weight_v") if own.get(name) is not None), module))


def set_weight_(module: nn.Module, value: Tensor) -> None:
    """Give the layer this plain weight: what computed its weight before is taken off. For copies only."""
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
    if trained is not None:  # what torch leaves behind is a parameter or a buffer, trained or not, as it comes
        del module.weight
        module.register_parameter("weight", nn.Parameter(value.clone(), requires_grad=trained))
        return
    with torch.no_grad():
        cast(Tensor, module.weight).copy_(value)


def clone(model: nn.Module) -> nn.Module:
    """A copy that shares no tensor with the model; ties within it stay ties."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and not value.is_leaf:  # left by old-style hooks; deepcopy refuses them
                memo[id(value)] = value.detach().clone()
    try:
        result = copy.deepcopy(model, memo)
    except Exception as error:  # a model may hold anything, and deepcopy raises whatever that raises
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); halve works on a copy so that "
            f"your model stays as it is: take off what copy.deepcopy(model) refuses"
        ) from error
    _check_apart(model, result)
    for module in result.modules():
        if parametrize.is_parametrized(module):  # its class belongs to it alone, and deepcopy shares it
            kind = type(module)
            body = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
            module.__class__ = type(kind.__name__, kind.__bases__, body)
    return result


def _check_apart(model: nn.Module, copied: nn.Module) -> None:
    """Raise where the copy would still run, read or write parts of the model itself."""
    own = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    what_to_do = "halve works on a copy so that your model stays as it is"
    if shared := [own[id(module)] or type(model).__name__ for module in copied.modules() if id(module) in own]:
        raise ModelError(
            f"copy.deepcopy of {type(model).__name__} gives parts of the model itself: {listed(shared)}; {what_to_do}"
        )
    if any(id(tensor) in tensors for tensor in (*copied.parameters(), *copied.buffers())):
        raise ModelError(f"copy.deepcopy of {type(model).__name__} gives its own tensors again; {what_to_do}")
    for name, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            if isinstance(value, types.FunctionType) and any(id(part) in own for part in _closed_over(value)):
                raise ModelError(
                    f"{name or type(model).__name__}.{attribute} is a function that holds layers of the model; a copy "
                    f"would run the original's; {what_to_do}: make it a method, or call the layers in forward"
                )


def _closed_over(function: types.FunctionType) -> list[Any]:
    """What a function carries along; bound methods count as what they are bound to."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [getattr(value, "__self__", value) for value in values]


def runs_as_is(module: nn.Module) -> bool:
    """Whether the layer runs as its PyTorch class does, and not by a forward of its own."""
    plain = next(base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules"))
    return all(getattr(type(module), f, None) is getattr(plain, f, None) for f in ("forward", "_conv_forward"))


def zeros_stay_zero(module: nn.Module) -> bool:
    """Whether the layer multiplies with its weight as it is. Only subclasses with a forward of their own are asked.

    Weight standardisation, for one, makes zeros into something else: then an input channel whose weights are all zero
    still moves the output.
    """
    if runs_as_is(module):
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
        except Exception:  # the forward of somebody's subclass, on a made-up input
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
