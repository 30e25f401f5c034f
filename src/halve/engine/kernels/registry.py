"""The list of kernel families. Add new families here."""

import torch

from halve.engine.kernels.cpu_sp.family import CpuDense, CpuPool, CpuSparse
from halve.engine.kernels.dense.family import Dense
from halve.engine.kernels.depthwise.family import Depthwise
from halve.engine.kernels.kernel import Kernel, KernelFamily, Piece
from halve.engine.kernels.mma_sp.family import MmaDense, MmaSparse
from halve.engine.kernels.pool.family import Pool
from halve.engine.kernels.stem.family import Stem
from halve.engine.kernels.wgmma_sp.chained import Chained
from halve.engine.kernels.wgmma_sp.family import WgmmaDense, WgmmaSparse
from halve.engine.kernels.wgmma_sp.joined import JoinedDense, JoinedSparse

FAMILIES: dict[str, KernelFamily] = {
    family.name: family
    for family in (
        *(
            Dense(),
            WgmmaSparse(),
            WgmmaDense(),
            JoinedSparse(),
            JoinedDense(),
            Chained(),
            MmaSparse(),
            MmaDense(),
            Stem(),
            Pool(),
        ),
        Depthwise(),
        *(CpuSparse(), CpuDense(), CpuPool()),
    )
}
FALLBACK = Kernel(Dense.name, "torch")  # runs every piece on every device


def family_of(kernel: Kernel) -> KernelFamily:
    return FAMILIES[kernel.family]


def kernels_for(piece: Piece, device: torch.device) -> list[Kernel]:
    """Every kernel that can run the piece on this device, the fallback first."""
    found = []
    for family in FAMILIES.values():
        if family.unavailable(device, piece.dtype) is None:
            found += [Kernel(family.name, variant) for variant in family.variants(piece, device)]
    return found


def no_sparse_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no sparse kernel can run on this device in this dtype; None if one can.

    Reasons are those of the families for this type of device, if there are any.
    """
    sparse = [family for family in FAMILIES.values() if family.sparse]
    fitting = [family for family in sparse if family.device_type in (None, device.type)]
    reasons = [family.unavailable(device, dtype) for family in fitting or sparse]
    return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))
