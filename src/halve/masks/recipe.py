"""What masks record of how they were made."""

from typing import Any

import torch
from torch import Tensor, nn

from halve.masks.fingerprint import Fingerprint
from halve.masks.mask import Mask
from halve.version import VERSION


def with_fingerprint(mask: Mask, weight: Tensor, shared_with: tuple[str, ...]) -> Mask:
    """The mask with a fingerprint of the weight it is made for."""
    fingerprint = Fingerprint.of(weight, mask.apply_to(weight))
    return Mask(mask.pattern, mask.layout, mask.stored_codes, fingerprint, shared_with)


def origin_of(model: nn.Module) -> dict[str, Any]:
    """Recipe entries that identify the model and the software.

    >>> origin_of(nn.ReLU())["model"]
    'torch.nn.modules.activation.ReLU'
    """
    kind = type(model)
    return {"model": f"{kind.__module__}.{kind.__qualname__}", "halve": VERSION, "torch": torch.__version__}
