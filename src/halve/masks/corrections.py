"""Corrections: scale and shift of normalisation layers, learned together with the masks.

A correction maps the state-dict name of a tensor to two tensors of its shape, stacked: the one that the masks were made
for, and the corrected one. `halve.learn(norms="learn")` finds them, `halve.apply` puts them on.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halve.errors import MaskError
from halve.masks.digests import dtypes_of

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
Corrections = Mapping[str, Tensor]


def checked(corrections: Corrections) -> dict[str, Tensor]:
    """A copy of the corrections. Raises `MaskError` if one is not a pair of finite float32 tensors."""
    for name, pair in corrections.items():
        if pair.dtype != torch.float32 or pair.dim() == 0 or len(pair) != 2 or not bool(pair.isfinite().all()):
            raise MaskError(f"the correction of {name} must be two finite float32 tensors, stacked")
    return {name: pair.detach().cpu().clone() for name, pair in corrections.items()}


def corrected(tensor: Tensor, pair: Tensor, *, applied: bool = False) -> Tensor:
    """The corrected tensor, with the dtype and on the device of the given one.

    If the given tensor is the one that the masks were made for, or a cast of it, this is exactly the corrected one, or
    its cast. A tensor that was trained further is corrected by the difference.

    Args:
        tensor: The tensor of a model.
        pair: Its correction.
        applied: Whether the model has the masks applied already: what was trained further then has its correction.

    >>> pair = torch.tensor([[1.0, 2.0], [1.5, 2.0]])
    >>> corrected(torch.tensor([1.0, 2.0]), pair), corrected(torch.tensor([1.25, 2.0]), pair)
    (tensor([1.5000, 2.0000]), tensor([1.7500, 2.0000]))
    """
    before, after = pair[0].to(tensor.device), pair[1].to(tensor.device)
    if torch.equal(tensor.float(), before):  # also in double precision, which a pair does not have
        return after.to(tensor.dtype)
    for dtype in dtypes_of(pair.dtype):
        if torch.equal(tensor, before.to(dtype).to(tensor.dtype)):
            return after.to(dtype).to(tensor.dtype)
        if torch.equal(tensor, after.to(dtype).to(tensor.dtype)):
            return tensor
    return tensor if applied else (tensor.float() + (after - before)).to(tensor.dtype)


def correct_(copy: nn.Module, corrections: Corrections, *, applied: bool = False) -> None:
    """Correct the tensors of a model in place. Raises `MaskError` if the corrections are for another model."""
    tensors = check_corrections(copy, corrections)
    with torch.no_grad():
        for name, pair in corrections.items():
            tensors[name].copy_(corrected(tensors[name], pair, applied=applied))


def check_corrections(model: nn.Module, corrections: Corrections) -> dict[str, Tensor]:
    """The tensors to correct, by name. Raises `MaskError` if one is not the scale or shift of a norm of this shape."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    for name, pair in corrections.items():
        owner, _, key = name.rpartition(".")
        norm = modules.get(owner)
        tensor = norm._parameters.get(key) if isinstance(norm, NORMS) else None
        if tensor is None or tensor.shape != pair.shape[1:] or not tensor.is_floating_point():
            got = "is no scale or shift of a norm" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise MaskError(f"the masks' corrections are for another model: {name} {got} in this one")
        tensors[name] = tensor
    return tensors
