"""`halve::run_kernel`: every kernel as a PyTorch operator, for torch.compile, torch.export and saved networks.

torch.compile and torch.export keep operators registered with torch.library opaque. In eager mode, layers call their
kernel family directly.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halve.engine.kernels.kernel import Kernel, KernelFamily
from halve.engine.kernels.registry import FAMILIES
from halve.engine.operations import Operation
from halve.errors import EngineError


def call(inputs: Sequence[Tensor], packed: Mapping[str, Tensor], operation: str, kernel: Kernel) -> Tensor:
    """Run a kernel through the operator. `operation` is JSON, prepared ahead since torch.compile cannot trace that."""
    result: Tensor = run_kernel(
        list(inputs), list(packed.values()), " ".join(packed), operation, kernel.family, kernel.variant
    )
    return result


@torch.library.custom_op("halve::run_kernel", mutates_args=())
def run_kernel(
    inputs: Sequence[Tensor], packed: Sequence[Tensor], names: str, operation: str, family: str, variant: str
) -> Tensor:
    chosen = _family(family)
    tensors = dict(zip(names.split(), packed, strict=True))
    computed = Operation.from_json(operation)
    return chosen.run(chosen.laid_out(inputs, computed), tensors, computed, variant)


@run_kernel.register_fake
def _fake(
    inputs: Sequence[Tensor], packed: Sequence[Tensor], names: str, operation: str, family: str, variant: str
) -> Tensor:
    tensors = dict(zip(names.split(), packed, strict=True))
    return _family(family).fake(inputs, tensors, Operation.from_json(operation))


def _family(family: str) -> KernelFamily:
    if family not in FAMILIES:
        raise EngineError(f"unknown kernel family {family!r}: this version of halve has {', '.join(FAMILIES)}")
    return FAMILIES[family]
