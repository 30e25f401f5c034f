"""What masks remember of how they were made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halve.find.select import SelectOptions
from halve.masks.fingerprint import Fingerprint
from halve.masks.mask import Mask
from halve.version import VERSION


def with_fingerprint(mask: Mask, weight: Tensor, shared_with: tuple[str, ...]) -> Mask:
    """The mask, remembering the weight that it is made for."""
    fingerprint = Fingerprint.of(weight, mask.put_on(weight))
    return Mask(mask.pattern, mask.layout, mask.stored_codes, fingerprint, shared_with)


def origin_of(model: nn.Module) -> dict[str, Any]:
    """What a recipe says of the model and of the software.

    >>> origin_of(nn.ReLU())["model"]
    'torch.nn.modules.activation.ReLU'
    """
    kind = type(model)
    return {"model": f"{kind.__module__}.{kind.__qualname__}", "halve": VERSION, "torch": torch.__version__}


def plain_options(selection: SelectOptions) -> dict[str, Any]:
    """The options of `select` as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return list(value)
        return value if value is None else str(value)

    return {key: plain(value) for key, value in selection.items()}
