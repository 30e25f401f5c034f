"""What may change the outputs of a model besides its parameters and buffers: code, which cannot be compared."""

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from halve.errors import listed
from halve.modules import runs_torch_forward, weight_sources

_OVERRIDDEN = ("forward", "_conv_forward", "_call_impl", "_compiled_call_impl")


def unchecked_in(model: nn.Module, layers: Collection[str]) -> dict[str, str]:
    """Hooks, parametrizations, replaced methods and tensor attributes of a model, by module name.

    Code may do anything, such as fill in the zeros of a masked layer. Empty for models that run their own layers only.

    Args:
        model: The model.
        layers: The masked layers. Their classes must not override forward either.

    >>> layer = nn.Linear(4, 4)
    >>> handle = layer.register_forward_hook(lambda module, inputs, output: output + 1)
    >>> unchecked_in(nn.Sequential(layer), [])
    {'0': 'forward hook'}
    """
    found = {}
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        found["all modules"] = "global forward hook"
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        if reasons := _reasons(module, name in layers, registered):
            found[name or type(model).__name__] = ", ".join(reasons)
    return found


def _reasons(module: nn.Module, masked: bool, registered: set[int]) -> list[str]:
    own, reasons = vars(module), []
    if module._forward_pre_hooks or module._forward_hooks:
        reasons.append("forward hook")
    if parametrize.is_parametrized(module):
        parts = {name: type(parts[0]).__name__ for name, parts in module.parametrizations.items()}  # type: ignore[union-attr, operator]
        reasons += [f"{name} is computed by {kind}" for name, kind in parts.items()]
    if replaced := [name for name in _OVERRIDDEN if own.get(name) is not None]:
        reasons.append(f"its {listed(replaced)} was replaced")
    if masked and not runs_torch_forward(module):
        reasons.append(f"{type(module).__name__} overrides forward")
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if type(tensor) not in (Tensor, nn.Parameter):
            reasons.append(f"{name} is a {type(tensor).__name__}")
    passed = {"_parameters", "_buffers"}
    if weight_sources(module):
        passed.add("weight")  # hooks leave the last one behind, and compute it again
    tensors = [name for name, value in own.items() if name not in passed and _hides_tensor(value, registered)]
    if tensors:
        reasons.append(f"{listed(tensors)}: tensor outside of parameters and buffers")
    return reasons


def _hides_tensor(value: object, registered: set[int], depth: int = 3) -> bool:
    """Whether an attribute holds a tensor, maybe in a container, that is neither a parameter nor a buffer."""
    if isinstance(value, Tensor):
        return id(value) not in registered
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return depth > 0 and any(_hides_tensor(part, registered, depth - 1) for part in inner)
