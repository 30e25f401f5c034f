"""Fold BatchNorm into the layer before it, in double precision, so that float16 never sees its statistics."""

from collections.abc import Iterator
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from halve.graph import Part
from halve.modules import kind_of

_ATEN = torch.ops.aten
_NORM = _ATEN._native_batch_norm_legit_no_training.default
_EPSILON = 6  # its argument
_NO_EPSILON = torch.finfo(torch.float32).tiny  # PyTorch refuses zero; one plus this is one
_BatchNorm = nn.modules.batchnorm._BatchNorm
_FROZEN = "FrozenBatchNorm2d"  # torchvision's: the same, with buffers only


def thaw_(model: nn.Module) -> None:
    """Replace torchvision's frozen BatchNorm layers by plain ones, which compute the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == _FROZEN:
                parent.add_module(name, _thawed(cast(Any, child)))


def _thawed(frozen: Any) -> nn.Module:
    norm = nn.BatchNorm2d(len(frozen.weight), eps=frozen.eps, device=frozen.weight.device, dtype=frozen.weight.dtype)
    norm.load_state_dict(frozen.state_dict(), strict=False)  # it has no counter of batches
    return norm.requires_grad_(False).eval()


def add_biases_(model: nn.Module) -> None:
    """Give every layer a bias, which a norm can be folded into."""
    for layer in model.modules():
        if kind_of(layer) is not None and getattr(layer, "bias", None) is None:
            weight = cast(Tensor, layer.weight)
            count = getattr(layer, "out_channels", None) or layer.out_features
            layer.bias = nn.Parameter(weight.new_zeros(cast(int, count)), requires_grad=False)


def fold_(model: nn.Module, part: Part) -> list[str]:
    """Fold each BatchNorm that directly follows its layer; returns the names of the folded ones.

    Statistics move into scale and shift in any case: a norm that cannot be folded, since it does not follow a layer,
    keeps numbers that float16 can hold. Folded norms become identities. Only tensors change, so that the captured graph
    stays valid for them, after `drop_identities_`.

    Args:
        model: The model, in eval mode, after `add_biases_`. It is changed.
        part: The same model, captured.
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None
    }
    pairs = dict(_pairs(model, part))
    for name, norm in norms.items():
        scale, shift = _scale_and_shift(norm)
        if name in pairs:
            _scale_(model.get_submodule(pairs[name]), scale, shift)
            scale, shift = torch.ones_like(scale), torch.zeros_like(shift)
        _set_(norm, scale, shift)
    return [name for name in norms if name in pairs]


def drop_identities_(part: Part, folded: list[str]) -> None:
    """Remove folded norms from the captured graph of a model; in others, the statistics have no epsilon any more."""
    graph, names = part.graph, set(folded)
    for node in [node for node in graph.nodes if node.target is _NORM]:
        if owner(part, node.args[3]) in names:
            for user in list(node.users):
                user.replace_all_uses_with(node.args[0])
                graph.erase_node(user)
            graph.erase_node(node)
        elif owner(part, node.args[3]) is not None:
            node.update_arg(_EPSILON, _NO_EPSILON)


def _pairs(model: nn.Module, part: Part) -> Iterator[tuple[str, str]]:
    """The names of norms and of the layers before them, where nothing else reads what is in between."""
    for node in part.graph.nodes:
        if node.target is not _NORM or any(user.target is not getitem or user.args[1] != 0 for user in node.users):
            continue
        before, norm = node.args[0], owner(part, node.args[3])
        if norm is None or before.op != "call_function" or len(before.args) < 2 or len(before.users) != 1:
            continue
        layer = owner(part, before.args[1], "weight")
        if layer is None or not _is_used_once(part, layer) or not _is_used_once(part, norm):
            continue
        kind = kind_of(model.get_submodule(layer))
        if kind == "linear" and before.meta["val"].dim() != 2:
            continue  # BatchNorm1d over tokens normalises dimension 1, not the last
        if kind is not None and not (kind == "conv_transpose" and cast(Any, model.get_submodule(layer)).groups > 1):
            yield norm, layer


def owner(part: Part, value: Any, tensor: str = "running_mean") -> str | None:
    """The module whose tensor of that name a placeholder holds."""
    name = part.tensors.get(value.name, "") if isinstance(value, Node) else ""
    return name.removesuffix(tensor).removesuffix(".") if f".{name}".endswith(f".{tensor}") else None


def _is_used_once(part: Part, module: str) -> bool:
    """Whether each tensor of a module has one reader: a shared layer must not take the norm of one call."""
    holders = [n for n in part.graph.nodes if part.tensors.get(n.name, "").rpartition(".")[0] == module]
    return all(len(holder.users) <= 1 for holder in holders)


def _scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


def _scale_(layer: Any, scale: Tensor, shift: Tensor) -> None:
    """Let a layer compute what it and the norm behind it compute."""
    weight = layer.weight.detach()
    shape = [1] * weight.dim()
    shape[1 if kind_of(layer) == "conv_transpose" else 0] = -1
    bias = layer.bias.detach().double() * scale + shift
    layer.weight = nn.Parameter((weight.double() * scale.reshape(shape)).to(weight.dtype), requires_grad=False)
    layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)


def _set_(norm: Any, scale: Tensor, shift: Tensor) -> None:
    like = norm.running_mean
    with torch.no_grad():
        norm.running_mean.zero_()
        norm.running_var.fill_(1)
    norm.eps = _NO_EPSILON
    norm.weight = nn.Parameter(scale.to(like.dtype), requires_grad=False)
    norm.bias = nn.Parameter(shift.to(like.dtype), requires_grad=False)


def overflows(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """The names of parameters and buffers whose values a narrower dtype cannot hold."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [
        name
        for name, tensor in named
        if tensor.is_floating_point() and bool(tensor.isfinite().all()) and not bool(tensor.to(dtype).isfinite().all())
    ]
