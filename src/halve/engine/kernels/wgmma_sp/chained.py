"""The end of a residual block and the 1x1 convolution that reads it, in one `wgmma` kernel.

The result of the block is written, since the next block adds it, but not read again. Memory is the limit of these
layers where images are large. The kernel has one tile, in which a warpgroup has all channels of its pixels, and dense
weights.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, wgmma
from halve.engine.kernels.cuda.convolution import readable
from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.wgmma_sp import launch
from halve.engine.kernels.wgmma_sp.packing import SIDE, pack_dense, packed_shape, unpack_dense
from halve.engine.kernels.wgmma_sp.tiling import TILES, Shortcut, Tiling, supported
from halve.engine.kernels.wgmma_sp.two_layers import TwoLayerFamily, check_fit, check_images, check_packed
from halve.engine.operations import ChainedConvolution, Convolution, Operation, Tensors


class Chained(TwoLayerFamily):
    """Keeps the blocks of the first weight, with those of the shortcut behind them, and those of the next."""

    name = "wgmma_chained"

    def variants(self, piece: Piece, device: torch.device) -> Sequence[str]:
        operation = piece.operation
        if not isinstance(operation, ChainedConvolution) or piece.dtype not in wgmma.DTYPES:
            return ()
        parts = [operation.convolution, operation.following, *([operation.shortcut] if operation.shortcut else [])]
        fits = all(map(supported, parts)) and operation.next_rows % SIDE == 0
        return tuple(
            str(tile) for tile in TILES.values() if fits and tile.own and operation.rows == tile.channels > SIDE
        )

    def pack(self, operation: Operation, tensors: Tensors) -> dict[str, Tensor]:
        chain = _chain(operation)
        firsts = [pack_dense(tensors["weight"], chain.convolution)]
        if chain.shortcut is not None:
            firsts.append(pack_dense(tensors["shortcut_weight"], chain.shortcut))
        following = pack_dense(tensors["next_weight"], chain.following)
        blocks = {
            "blocks": torch.cat([part.flatten(1, 2) for part in firsts], 1).contiguous(),
            "next_blocks": following,
        }
        return blocks | {name: tensors[name] for name in ("bias", "next_bias") if name in tensors}

    def unpack(self, operation: Operation, packed: Tensors) -> dict[str, Tensor]:
        chain = _chain(operation)
        shape = packed_shape(chain.convolution, sparse=False)
        first, rest = packed["blocks"].split([shape[1], packed["blocks"].shape[1] - shape[1]], 1)
        tensors = {"weight": unpack_dense(first.reshape(shape), chain.convolution)}
        if chain.shortcut is not None:
            rest = rest.reshape(packed_shape(chain.shortcut, sparse=False))
            tensors["shortcut_weight"] = unpack_dense(rest, chain.shortcut)
        tensors["next_weight"] = unpack_dense(packed["next_blocks"], chain.following)
        return tensors | {name: packed[name] for name in ("bias", "next_bias") if name in packed}

    def fits(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> bool:
        return _tiling(inputs, _chain(operation), variant) is not None

    def compilation(self, inputs: Sequence[Tensor], operation: Operation, variant: str) -> partial[Any] | None:
        chain, x = _chain(operation), inputs[0]
        plan = _tiling(inputs, chain, variant)
        if plan is None:
            return None
        described = launch.variant_of(
            *(plan, chain.convolution, x.dtype),
            sparse=False,
            residual=chain.shortcut is None,
            shortcut=chain.shortcut is not None,
            following=chain.following,
        )
        return partial(launch.machine_code, described, driver.architecture(x.device.index))

    def run(self, inputs: Sequence[Tensor], packed: Tensors, operation: Operation, variant: str) -> Tensor:
        chain = _chain(operation)
        _check(inputs, packed, chain)
        plan = _tiling(inputs, chain, variant) if inputs[0].is_cuda else None
        if plan is None:
            return chain.reference(inputs, self.unpack(operation, packed))
        x, second = map(readable, inputs)
        both = torch.empty(chain.out_shape(x.shape), dtype=x.dtype, device=x.device)
        y, z = chain.split(both, x.shape)
        operands = launch.Operands(
            *(x, packed["blocks"], packed.get("bias")),
            residual=second if chain.shortcut is None else None,
            shortcut=None if chain.shortcut is None else second,
            next_packed=packed["next_blocks"],
            next_bias=packed.get("next_bias"),
        )
        launch.launch(operands, chain.convolution, plan, False, y, _shortcut(chain), chain.following, z)
        return both


def _tiling(inputs: Sequence[Tensor], chain: ChainedConvolution, variant: str) -> Tiling | None:
    if not inputs[0].numel():
        return None
    return launch.fitting(
        *(inputs[0], chain.convolution, variant),
        sparse=False,
        residual=chain.shortcut is None,
        shortcut=_shortcut(chain),
        next_rows=chain.next_rows,
    )


def _shortcut(chain: ChainedConvolution) -> Shortcut | None:
    return Shortcut(chain.shortcut_channels, 1) if chain.shortcut is not None else None


def _chain(operation: Operation) -> ChainedConvolution:
    assert isinstance(operation, ChainedConvolution)
    return operation


def _check(inputs: Sequence[Tensor], packed: Tensors, chain: ChainedConvolution) -> None:
    """Raise `EngineError` if the kernel would misread the arguments or read out of bounds."""
    check_images(inputs, (chain.channels, chain.shortcut_channels or chain.rows))
    x, second = inputs
    check_fit(inputs, (x.shape[0], *x.shape[2:]) == (second.shape[0], *second.shape[2:]))
    firsts: list[Convolution] = [chain.convolution, *([chain.shortcut] if chain.shortcut else [])]
    shapes = [packed_shape(part, sparse=False) for part in firsts]
    blocks = (shapes[0][0], sum(shape[1] for shape in shapes), shapes[0][3])
    following = packed_shape(chain.following, sparse=False)
    biases = {"bias": chain.rows, "next_bias": chain.next_rows}
    check_packed(inputs, packed, {"blocks": blocks, "next_blocks": following}, biases)
