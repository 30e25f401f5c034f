"""Compile and launch the `wgmma` convolution."""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.cuda.tensor_map import TensorMap, tensor_map
from halve.engine.kernels.cuda.wgmma import multiply_source
from halve.engine.kernels.wgmma_sp.packing import SIDE
from halve.engine.kernels.wgmma_sp.promising import Problem, fastest, promising
from halve.engine.kernels.wgmma_sp.tiling import MAX_TAPS, TILES, Shortcut, Tiling, tiling
from halve.engine.operations import Convolution

_NHWC = torch.channels_last
_THREADS = 384


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    sparse: bool
    bf16: bool
    residual: bool
    own: bool
    resident: bool
    blocks: int
    pixels: int
    parts: int
    stages: int
    activation: str
    shortcut: bool = False
    split: int = 1
    light: bool = False
    next: int = 0  # blocks of 64 output channels of the next convolution
    next_activation: str = "none"
    halves: bool = False
    ahead: bool = False
    unrolled: int = 0  # pixels from one row of a 3x3 window to the next, if its taps are unrolled

    def options(self) -> tuple[str, ...]:
        """Preprocessor definitions for the compiler."""
        values = {name.upper(): value for name, value in self._asdict().items() if not isinstance(value, str)}
        activations = {"ACTIVATE": self.activation, "ACTIVATE_NEXT": self.next_activation}
        return (
            *(f"-D{name}={int(value)}" for name, value in values.items()),
            *(f"-D{name}=activate_{activation}" for name, activation in activations.items()),
        )


class _Shape(ctypes.Structure):
    """`Shape` in conv.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                *("chunks", "taps", "planes", "row_tiles", "pixel_tiles", "rows", "flat", "tile_rows", "tile_images"),
                *("tiles_per_image", "stride", "pad_h", "pad_w", "pitch", "box_pixels", "slot_bytes", "stage_bytes"),
                *("stored_bytes", "pixel_slots", "weight_slots", "staging", "weights", "barriers", "lag"),
                *("shortcut_chunks", "shortcut_stride", "shortcut_bytes", "exchange", "next_weights", "next_staging"),
                *("out_height", "out_width", "images"),
            )
        ),
        ("begins", ctypes.c_uint64),
        ("shifts", ctypes.c_uint16 * MAX_TAPS),
    )


class Operands(NamedTuple):
    """The tensors of one launch: on one GPU, images channels last and aligned to 16 bytes, vectors in float32."""

    x: Tensor
    packed: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    residual: Tensor | None = None
    shortcut: Tensor | None = None
    next_packed: Tensor | None = None
    next_bias: Tensor | None = None


def machine_code(variant: Variant, architecture: str) -> bytes:
    """The cubin of a variant, compiled on first use."""
    return _machine_code(variant, architecture)


@functools.cache
def _machine_code(variant: Variant, architecture: str) -> bytes:
    multiply = multiply_source(variant.pixels, variant.sparse, variant.bf16)
    source = jit.source(__package__, "conv.cu").replace("//MULTIPLY", multiply)
    return jit.cubin(source, architecture, variant.options())


def version() -> str:
    """A digest of the source and the tiles."""
    return jit.digest(jit.source(__package__, "conv.cu"), multiply_source(8, True, False), repr(TILES))


def fitting(
    x: Tensor,
    convolution: Convolution,
    tile: str,
    *,
    sparse: bool,
    residual: bool = False,
    shortcut: Shortcut | None = None,
    next_rows: int = 0,
) -> Tiling | None:
    """The tiling of an input; None if the kernel cannot run it in this tile.

    Args:
        x: the input.
        convolution: what is computed of it.
        tile: a key of `TILES`.
        sparse: whether the weights are 2:4.
        residual: whether a residual is added.
        shortcut: the convolution of a second input that is added.
        next_rows: the output channels of the next convolution, if it is computed as well.
    """
    size = (x.shape[0], x.shape[2], x.shape[3])
    processors = driver.processors(x.device.index)
    return _fitting(convolution, size, tile, sparse, residual, processors, shortcut, next_rows)


def usable(
    x: Tensor,
    convolution: Convolution,
    tile: str,
    *,
    sparse: bool,
    residual: bool = False,
    shortcut: Shortcut | None = None,
) -> Tiling | None:
    """The tiling to run an input in; None if it fits into no tile. Arguments are those of `fitting`.

    Inputs of sizes that were not planned may not fit into the planned tile. They run in the one that is probably the
    fastest of those that they fit into.
    """
    found = fitting(x, convolution, tile, sparse=sparse, residual=residual, shortcut=shortcut)
    if found is not None:
        return found
    size = (x.shape[0], x.shape[2], x.shape[3])
    return _fastest(Problem(convolution, size, sparse, residual, driver.processors(x.device.index), shortcut))


@functools.lru_cache(4096)
def _fastest(problem: Problem) -> Tiling | None:
    convolution, size, sparse, residual, processors, shortcut = problem
    found = (_fitting(convolution, size, tile, sparse, residual, processors, shortcut, 0) for tile in TILES)
    return fastest((plan for plan in found if plan is not None), problem)


def worth_timing(
    x: Tensor,
    convolution: Convolution,
    tiles: Sequence[str],
    *,
    sparse: bool,
    residual: bool = False,
    shortcut: Shortcut | None = None,
) -> list[str]:
    """Those of the tiles that may be the fastest for an input. Arguments are those of `fitting`."""
    found = {tile: fitting(x, convolution, tile, sparse=sparse, residual=residual, shortcut=shortcut) for tile in tiles}
    size = (x.shape[0], x.shape[2], x.shape[3])
    problem = Problem(convolution, size, sparse, residual, driver.processors(x.device.index), shortcut)
    return promising({tile: plan for tile, plan in found.items() if plan is not None}, problem)


@functools.lru_cache(4096)
def _fitting(
    convolution: Convolution,
    size: tuple[int, int, int],
    tile: str,
    sparse: bool,
    residual: bool,
    processors: int,
    shortcut: Shortcut | None,
    next_rows: int,
) -> Tiling | None:
    return tiling(
        *(convolution, size, TILES[tile]),
        sparse=sparse,
        residual=residual,
        processors=processors,
        shortcut=shortcut,
        next_rows=next_rows,
    )


def variant_of(
    plan: Tiling,
    convolution: Convolution,
    dtype: torch.dtype,
    *,
    sparse: bool,
    residual: bool = False,
    shortcut: bool = False,
    following: Convolution | None = None,
) -> Variant:
    return Variant(
        sparse=sparse,
        bf16=dtype == torch.bfloat16,
        residual=residual,
        shortcut=shortcut,
        own=plan.tile.own,
        resident=plan.resident,
        split=plan.tile.split,
        light=plan.tile.light,
        halves=plan.tile.halves,
        ahead=plan.ahead,
        blocks=plan.tile.blocks,
        pixels=plan.pixels,
        parts=plan.parts,
        stages=plan.stages,
        activation=convolution.activation,
        next=0 if following is None else following.rows // SIDE,
        next_activation="none" if following is None else following.activation,
        unrolled=plan.pitch * plan.tile_images if plan.tile.unrolled else 0,
    )


def run(
    operands: Operands, convolution: Convolution, plan: Tiling, sparse: bool, shortcut: Shortcut | None = None
) -> Tensor:
    """Launch the kernel on the current stream. `shortcut` describes the shortcut, if there is one."""
    x = operands.x
    out_size = convolution.out_size(*x.shape[2:])
    out = torch.empty((len(x), convolution.rows, *out_size), dtype=x.dtype, device=x.device, memory_format=_NHWC)
    launch(operands, convolution, plan, sparse, out, shortcut)
    return out


def launch(
    operands: Operands,
    convolution: Convolution,
    plan: Tiling,
    sparse: bool,
    out: Tensor,
    shortcut: Shortcut | None = None,
    following: Convolution | None = None,
    next_out: Tensor | None = None,
) -> None:
    """Launch the kernel on the current stream. `out` and `next_out` get the results, also of the next convolution."""
    x, second = operands.x, operands.residual
    residual, joined = second is not None, shortcut is not None
    variant = variant_of(
        plan, convolution, x.dtype, sparse=sparse, residual=residual, shortcut=joined, following=following
    )
    kernel = _kernel(variant, x.device.index, plan.shared_bytes)
    stored = more = _map(out, plan.stored, plan.flat)
    if shortcut is not None and operands.shortcut is not None:
        more = _map(operands.shortcut, plan.shortcut_box, plan.flat, shortcut.stride)
    elif second is not None:
        more = _map(second, plan.stored, plan.flat)
    kernel.launch(
        (plan.grid, 1),
        _THREADS,
        (
            _map(x, plan.box, plan.flat, convolution.stride[0]),
            stored,
            more,
            operands.packed,
            operands.bias,
            operands.scale,
            out,
            stored if next_out is None else _map(next_out, plan.stored, plan.flat),
            operands.next_packed,
            operands.next_bias,
            _shape(plan, convolution, out, shortcut),
        ),
        plan.tile.split,
    )


def _map(x: Tensor, box: tuple[int, int, int], flat: bool, stride: int = 1) -> TensorMap:
    images, channels, height, width = x.shape
    if flat:
        return tensor_map(x, (channels, images * height * width, 1, 1), (SIDE, *box), (1, 1, 1, 1))
    pitches = (channels, channels * width * height, channels * width)
    return tensor_map(x, (channels, width, images, height), (SIDE, *box), (1, stride, 1, stride), pitches)


def _shape(plan: Tiling, convolution: Convolution, out: Tensor, shortcut: Shortcut | None) -> _Shape:
    return _Shape(
        chunks=-(-convolution.channels // SIDE),
        taps=len(plan.shifts),
        planes=plan.planes,
        row_tiles=plan.row_tiles,
        pixel_tiles=plan.pixel_tiles,
        rows=convolution.rows,
        flat=plan.flat,
        tile_rows=plan.tile_rows,
        tile_images=plan.tile_images,
        tiles_per_image=plan.tiles_per_image,
        stride=convolution.stride[0],
        pad_h=convolution.padding[0],
        pad_w=convolution.padding[1],
        pitch=plan.pitch,
        box_pixels=plan.box_pixels,
        slot_bytes=plan.slot_bytes,
        stage_bytes=plan.stage_bytes,
        stored_bytes=plan.stored_bytes,
        pixel_slots=plan.pixel_slots,
        weight_slots=plan.weight_slots,
        staging=plan.staging,
        weights=plan.weights,
        barriers=plan.barriers,
        lag=plan.lag,
        shortcut_chunks=0 if shortcut is None else -(-shortcut.channels // SIDE),
        shortcut_stride=1 if shortcut is None else shortcut.stride,
        shortcut_bytes=2 * SIDE * math.prod(plan.shortcut_box),
        exchange=plan.exchange,
        next_weights=plan.next_weights,
        next_staging=plan.next_staging,
        out_height=out.shape[2],
        out_width=out.shape[3],
        images=out.shape[0],
        begins=plan.begins,
        shifts=(ctypes.c_uint16 * MAX_TAPS)(*plan.shifts),
    )


@functools.cache
def _kernel(variant: Variant, device: int, shared_bytes: int) -> driver.Kernel:
    return driver.Kernel(machine_code(variant, driver.architecture(device)), "conv", device, shared_bytes)
