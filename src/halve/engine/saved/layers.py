"""Layers of compiled networks in files: a description as JSON, and the tensors of one kernel family.

Weights are stored packed for the family that runs the layer, or in canonical form. Loading always unpacks them, and
packs them again: no kernel ever reads a packed tensor that halve did not make.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FAMILIES, family_of
from halve.engine.layer import Layer
from halve.engine.operations import ACTIVATIONS, OPERATIONS, Operation
from halve.engine.saved import plain

_KEYS = {"name", "operation", "dtype", "packed", "kernels"}
_MOST_SIZES = 4096  # input sizes with a kernel of their own
_MOST_PER_VALUE = 16  # weights per packed value: two for 2:4


def describe_layer(layer: Layer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A layer as JSON, and its tensors."""
    packed = [kernel.family for kernel in layer.kernels.values() if not family_of(kernel).library]
    family = packed[0] if packed else None
    described = {
        "name": plain.printable(layer.name),
        "operation": {"kind": type(layer.operation).__name__, **dataclasses.asdict(layer.operation)},  # type: ignore[call-overload]
        "dtype": plain.name_of(layer.dtype),
        "packed": family,
        "kernels": {str(size): list(kernel) for size, kernel in layer.kernels.items()},
    }
    return described, layer.tensors() if family is None else layer.packed(family)


def build_layer(described: Any, packed: Mapping[str, Tensor]) -> Layer:
    """A layer from its description. Raises `ValueError` if it is not valid, or its tensors do not fit."""
    if not isinstance(described, dict) or described.keys() != _KEYS:
        raise ValueError(f"a layer must have the keys {', '.join(sorted(_KEYS))}")
    name, dtype = plain.check_text(described["name"]), plain.dtype_named(described["dtype"])
    operation, kernels = _operation(described["operation"]), _kernels(described["kernels"])
    layer = Layer(name, operation, _tensors(operation, described["packed"], packed, dtype), dtype)
    layer.use(kernels)
    return layer


def _operation(described: Any) -> Operation:
    fields = dict(described) if isinstance(described, dict) else {}
    kind = OPERATIONS.get(str(fields.pop("kind", None)))
    if kind is None:
        raise ValueError(f"unknown operation: this version of halve has {', '.join(OPERATIONS)}")
    operation = plain.build(kind, fields)
    if getattr(operation, "activation", "none") not in ACTIVATIONS:
        raise ValueError(f"unknown activation: this version of halve has {', '.join(ACTIVATIONS)}")
    return operation


def _kernels(described: Any) -> dict[int, Kernel]:
    if not isinstance(described, dict) or len(described) > _MOST_SIZES:
        raise ValueError(f"a layer must have kernels for at most {_MOST_SIZES} input sizes")
    kernels = {}
    for size, kernel in described.items():
        if not isinstance(kernel, list) or len(kernel) != 2 or not all(isinstance(text, str) for text in kernel):
            raise ValueError("a kernel must be a family and a variant")
        if kernel[0] not in FAMILIES:
            raise ValueError(f"unknown kernel family {kernel[0][:20]!r}: this version has {', '.join(FAMILIES)}")
        kernels[plain.positive(size)] = Kernel(*kernel)
    return kernels


def _tensors(operation: Operation, family: Any, packed: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors in canonical form."""
    if family is not None and (not isinstance(family, str) or family not in FAMILIES):
        raise ValueError(f"unknown kernel family {str(family)[:20]!r}: this version has {', '.join(FAMILIES)}")
    shape: tuple[int, ...] | None = getattr(operation, "weight_shape", None)
    if shape is not None and math.prod(shape) > _MOST_PER_VALUE * sum(tensor.numel() for tensor in packed.values()):
        raise ValueError(f"its tensors are too small for a weight of shape {shape}")
    tensors = dict(packed) if family is None else FAMILIES[family].unpack(operation, packed)
    wanted = {} if shape is None else {"weight": shape}
    if shape is not None:
        wanted |= {"bias": shape[:1]} if "bias" in tensors else {}
        wanted |= {"scale": shape[:1]} if getattr(operation, "scaled", False) else {}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != wanted:
        raise ValueError(f"its tensors must have the shapes {wanted}")
    if "weight" in tensors and tensors["weight"].dtype != dtype:
        raise ValueError(f"its weight must be {dtype}, got {tensors['weight'].dtype}")
    for name in ("bias", "scale"):
        if name in tensors and tensors[name].dtype not in (torch.float32, torch.float64):
            raise ValueError(f"its {name} must be in single or double precision, got {tensors[name].dtype}")
    return tensors
