"""Tensor maps: how the copy engine of Hopper GPUs (TMA) addresses boxes of images in memory."""

import ctypes
import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver

_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_256B, _FILL_ZERO = 0, 3, 3, 0
_ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """`CUtensorMap`."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def tensor_map(
    x: Tensor, size: Sequence[int], box: Sequence[int], strides: Sequence[int], pitches: Sequence[int] | None = None
) -> TensorMap:
    """Encode a map of contiguous 16-bit data.

    Args:
        x: the data.
        size: its dimensions, the fastest first.
        box: the elements of a box along each dimension.
        strides: the step between these elements.
        pitches: elements in memory from one to the next along each dimension but the first, if the data does not lie in
            the order of `size`.
    """
    rank = len(size)
    if pitches is None:
        pitches = list(itertools.accumulate(size[:-1], operator.mul))
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _ALIGNMENT)
    encoded = TensorMap.from_buffer(buffer, -ctypes.addressof(buffer) % _ALIGNMENT)
    driver.call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(encoded),
        _TYPES[x.dtype],
        rank,
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * rank)(*size),
        (ctypes.c_uint64 * (rank - 1))(*(pitch * x.element_size() for pitch in pitches)),
        (ctypes.c_uint32 * rank)(*(side * stride for side, stride in zip(box, strides, strict=True))),
        (ctypes.c_uint32 * rank)(*strides),
        *(_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_256B, _FILL_ZERO),
    )
    return encoded
