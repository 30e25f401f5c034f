"""What masks record of how they were made, and of the model that they were made for."""

from typing import Any

import torch
from torch import Tensor, nn

from halve.masks.digests import Digests, digests_of, has_digest, named_tensors, ties_of
from halve.masks.fingerprint import Fingerprint
from halve.masks.mask import Mask, MaskSet
from halve.modules import weight_name
from halve.version import VERSION


def with_fingerprint(mask: Mask, weight: Tensor, shared_with: tuple[str, ...]) -> Mask:
    """The mask with a fingerprint of the weight it is made for."""
    fingerprint = Fingerprint.of(weight, mask.apply_to(weight))
    return Mask(mask.pattern, mask.layout, mask.stored_codes, fingerprint, shared_with)


def with_digests(masks: MaskSet, model: nn.Module) -> MaskSet:
    """The masks with digests of all tensors of the model that they are made for.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> list(with_digests(halve.prune(model), model).digests.dense)[:3]
    ['0.weight', '0.bias', '1.weight']
    """
    tensors = {name: tensor for name, tensor in named_tensors(model, masks).items() if has_digest(tensor)}
    if not tensors.keys() >= set(map(weight_name, masks)):
        return masks  # a masked weight whose bytes say nothing
    tied = ties_of(tensors, masks)
    prints = {name: mask.fingerprint for name, mask in masks.items() if mask.fingerprint is not None}
    known = {weight_name(name): print_.dense for name, print_ in prints.items()}
    dense = {name: digests_of(tensor, known.get(name)) for name, tensor in tensors.items() if name not in tied}
    masked = {
        name: digests_of(mask.apply_to(tensors[weight_name(name)]), prints[name].masked if name in prints else None)
        for name, mask in masks.items()
    }
    return masks.with_digests(Digests(dense, masked, tied))


def origin_of(model: nn.Module) -> dict[str, Any]:
    """Recipe entries that identify the model and the software.

    >>> origin_of(nn.ReLU())["model"]
    'torch.nn.modules.activation.ReLU'
    """
    kind = type(model)
    return {"model": f"{kind.__module__}.{kind.__qualname__}", "halve": VERSION, "torch": torch.__version__}
