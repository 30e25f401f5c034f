"""Which pixels a convolution or pooling reads: the planes it needs, the shift of each kernel position, and its masks.

The code walks over the output's pixels, flattened over images, rows and columns. At each kernel position ("tap") it
reads the input at a fixed distance from there. That works on the input itself if input and output have the same size.
For other sizes and strides, the input is first copied to *planes* of the output's size: plane (a, b) holds, at row i
and column j, the input's pixel (a + stride i, b + stride j). Taps share a plane where they can: with stride 2, there
are four of them for a 3x3 kernel. Pixels outside of the image are masked and never read.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halve.engine.kernels.cpu_sp.memory import new_planes
from halve.engine.kernels.cpu_sp.split import split_phase
from halve.engine.kernels.cpu_sp.worker import LANES, Operand, Phase, Schedule
from halve.engine.kernels.planes import has_rows
from halve.engine.operations import Convolution, MaxPool


class Axis(NamedTuple):
    """A kernel position along rows or columns: output i reads the plane's place i + shift."""

    start: int  # of the plane: its first place holds this one of the input
    shift: int
    low: int  # the outputs that read inside of the image: low <= i < high
    high: int


def _axis(size: int, out: int, offset: int, stride: int) -> Axis:
    """For a tap whose output i reads the input's place `offset + stride * i`."""
    low = max(0, -(offset // stride))
    high = max(low, min(out, (size - offset + stride - 1) // stride))
    start, shift = offset % stride, offset // stride
    if high + shift > out:  # the shared plane does not hold so many places
        return Axis(offset, 0, low, high)
    return Axis(start, shift, low, high)


@dataclass(frozen=True, eq=False)
class Geometry:
    """How an operation reads images of one size."""

    images: int
    lanes: int  # pixels in a vector
    out: tuple[int, int]
    planes: tuple[tuple[int, int], ...]  # where each starts
    direct: bool  # the input itself is the only plane
    plane_of: tuple[int, ...]  # of each tap
    shifts: tuple[int, ...]  # of each tap, in pixels
    masks: npt.NDArray[np.uint16]  # (vectors, 1 + taps): the lanes that hold pixels, and the ones that each tap reads
    copies: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]  # per plane: where to, and where from
    halves: "Halves | None"  # planes that can be split off quickly

    @property
    def vectors(self) -> int:
        return len(self.masks)


@functools.lru_cache(256)
def geometry(window: Convolution | MaxPool, images: int, height: int, width: int, lanes: int = LANES) -> Geometry:
    """The geometry of an operation on images of this size. The masks take 2 bytes per vector and tap."""
    out = tuple(window.out_shape((images, 1, height, width))[2:])
    rows, columns = (
        [_axis(size, end, d * k - p, s) for k in range(n)]
        for size, end, n, s, p, d in zip(
            (height, width),
            out,
            window.kernel,
            window.stride,
            window.padding,
            window.dilation,
            strict=True,
        )
    )
    taps = [(row, column) for row in rows for column in columns]
    planes = sorted({(row.start, column.start) for row, column in taps})
    direct = planes == [(0, 0)] and window.stride == (1, 1) and out == (height, width)
    valid = np.zeros((1 + len(taps), images, *out), bool)
    valid[0] = True
    for tap, (row, column) in enumerate(taps):
        valid[1 + tap, :, row.low : row.high, column.low : column.high] = True
    pixels = images * out[0] * out[1]
    flat = np.zeros((1 + len(taps), -(-pixels // lanes) * lanes), bool)
    flat[:, :pixels] = valid.reshape(1 + len(taps), -1)
    padded = np.zeros((1 + len(taps), flat.shape[1] // lanes, LANES), bool)
    padded[..., :lanes] = flat.reshape(1 + len(taps), -1, lanes)
    masks = np.packbits(padded, axis=-1, bitorder="little").view(np.uint16)[..., 0]
    return Geometry(
        images,
        lanes,
        out,
        tuple(planes),
        direct,
        tuple(planes.index((row.start, column.start)) for row, column in taps),
        tuple(row.shift * out[1] + column.shift for row, column in taps),
        np.ascontiguousarray(masks.T),
        tuple(_copy(start, window.stride, (height, width), out) for start in planes),
        _halves(planes, window.stride, (height, width), out),
    )


def _copy(
    start: tuple[int, int], stride: tuple[int, int], size: tuple[int, int], out: tuple[int, int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a plane's pixels go, and where they come from."""
    to, source = [], []
    for first, step, length, end in zip(start, stride, size, out, strict=True):
        low = max(0, -(first // step))
        high = max(low, min(end, (length - first + step - 1) // step))
        to.append(slice(low, high))
        source.append(slice(first + step * low, max(first + step * (high - 1) + 1, 0) if high > low else 0, step))
    everything = (slice(None), slice(None))
    return (*everything, *to), (*everything, *source)


def copied_planes(x: Tensor, shape: Geometry) -> Tensor:
    """The planes of an input: (N, planes * channels, H, W) in the output's size."""
    images, channels, height, width = x.shape
    planes = new_planes((images, len(shape.planes) * channels, *shape.out), 1, x.dtype)
    if shape.halves is not None and has_rows(x) and shape.lanes == LANES:  # splitting takes AVX-512
        strides, pitch = x.stride()[:2], planes.stride(1)
        split = _splitting(shape, channels, height, width, strides, pitch, x.element_size(), torch.get_num_threads())
        split(x.data_ptr(), planes.data_ptr())
        return planes
    for plane, (to, source) in enumerate(shape.copies):
        planes[:, plane * channels : (plane + 1) * channels][to].copy_(x[source])
    return planes


@functools.lru_cache(64)
def _splitting(
    shape: Geometry,
    channels: int,
    height: int,
    width: int,
    strides: tuple[int, int],
    pitch: int,
    size: int,
    workers: int,
) -> Schedule:
    phase = splitting(shape, channels, height, width, strides, pitch, Operand(0), Operand(1), size, workers)
    return Schedule([phase], size * LANES, workers)


def splitting(
    shape: Geometry,
    channels: int,
    height: int,
    width: int,
    strides: tuple[int, int],
    pitch: int,
    x: Operand,
    out: Operand,
    size: int,
    workers: int,
) -> Phase:
    """The phase that splits images into planes.

    Args:
        shape: with `halves`.
        channels: of the images.
        height: of the images.
        width: of the images.
        strides: from an image and a channel to the next.
        pitch: of the planes.
        x: where images are.
        out: where planes go.
        size: bytes of a number.
        workers: number of threads.
    """
    assert shape.halves is not None
    rows = _rows(shape, channels, height, width, strides, pitch, size)
    odd = pitch * channels * size if shape.halves.columns > 1 else 0
    return split_phase(
        rows, x, out, size=size, width=width, out_step=size * shape.out[1], odd_distance=odd, workers=workers
    )


class Halves(NamedTuple):
    """Planes that are even and odd rows and columns: how many of each there are, 1 or 2. The even ones come first."""

    rows: int
    columns: int


def _halves(
    planes: list[tuple[int, int]], stride: tuple[int, int], size: tuple[int, int], out: tuple[int, int]
) -> Halves | None:
    """None if planes are something else."""
    rows, columns = (len({plane[axis] for plane in planes}) for axis in (0, 1))
    fit = all(-(-length // 2) <= end for length, end in zip(size, out, strict=True))
    expected = [(row, column) for row in range(rows) for column in range(columns)]
    return Halves(rows, columns) if stride == (2, 2) and fit and sorted(planes) == expected else None


def _rows(
    shape: Geometry, channels: int, height: int, width: int, strides: tuple[int, int], pitch: int, size: int
) -> npt.NDArray[np.int64]:
    """The rows to split: for each channel, image, and even or odd rows. See `split_phase`."""
    assert shape.halves is not None
    channel, image, half = (
        axis.reshape(-1)
        for axis in np.meshgrid(*map(np.arange, (channels, shape.images, shape.halves.rows)), indexing="ij")
    )
    source = channel * strides[1] + image * strides[0] + half * width
    plane = half * shape.halves.columns * channels
    target = (plane + channel) * pitch + image * shape.out[0] * shape.out[1]
    count = (height - half + 1) // 2
    keep = count > 0
    return np.column_stack([size * source, size * target, count])[keep].astype(np.int64)
