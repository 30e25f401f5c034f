"""`halve::run_kernel`: any kernel of any family as one PyTorch operator, for graphs that are traced, exported or saved.

Operators registered with torch.library stay as they are under torch.compile and torch.export. Outside of these, layers
call their family directly.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halve.engine.kernels.kernel import Kernel, KernelFamily
from halve.engine.kernels.registry import FAMILIES
from halve.engine.operations import Operation
from halve.errors import EngineError


def call(inputs: Sequence[Tensor], packed: Mapping[str, Tensor], operation: str, kernel: Kernel) -> Tensor:
    """Run a kernel through the operator. The operation is JSON text, which torch.compile cannot make."""
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
    return chosen.run([chosen.reads.of(x) for x in inputs], tensors, Operation.from_json(operation), variant)


@run_kernel.register_fake
def _fake(
    inputs: Sequence[Tensor], packed: Sequence[Tensor], names: str, operation: str, family: str, variant: str
) -> Tensor:
    tensors = dict(zip(names.split(), packed, strict=True))
    return _family(family).fake(inputs, tensors, Operation.from_json(operation))


def _family(family: str) -> KernelFamily:
    if family not in FAMILIES:
        raise EngineError(f"there is no kernel family {family!r}; this version of halve has {', '.join(FAMILIES)}")
    return FAMILIES[family]
