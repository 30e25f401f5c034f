"""What all CUDA families for convolutions do before they launch a kernel."""

import math

import pytest
import torch

from halve.engine.kernels.cuda import driver
from halve.engine.kernels.cuda.convolution import ConvolutionFamily, check_aligned
from halve.engine.kernels.depthwise.family import Depthwise
from halve.engine.kernels.mma_sp.family import MmaDense, MmaSparse
from halve.engine.kernels.wgmma_sp.family import WgmmaDense, WgmmaSparse
from halve.engine.operations import Convolution, Linear
from halve.errors import EngineError
from tests.random_masks import random

CONV = Convolution(16, 64, (3, 3), (2, 2), (1, 1), activation="relu")
LAYERS = [
    *((family, CONV) for family in (WgmmaSparse(), WgmmaDense(), MmaSparse(), MmaDense())),
    (Depthwise(), Convolution(64, 1, (3, 3), (2, 2), (1, 1), groups=64)),
]


def tensors(convolution):
    weight = random(*convolution.weight_shape, seed=1)
    weight[:, ::4], weight[:, 1::4] = 0, 0
    return {"weight": weight.half(), "bias": random(convolution.rows, seed=2)}


@pytest.mark.parametrize(("family", "convolution"), LAYERS, ids=lambda value: getattr(value, "name", ""))
def test_an_empty_batch_computes_nothing(family, convolution, monkeypatch):
    monkeypatch.setattr(ConvolutionFamily, "reference", None)  # would raise if called
    x = torch.zeros(0, 64, 9, 7, dtype=torch.float16)
    packed = family.pack(convolution, tensors(convolution))
    residual = torch.zeros(0, convolution.rows, 5, 4, dtype=torch.float16)
    for inputs in ([x], [x, residual]):
        y = family.run(inputs, packed, convolution, "128x256")
        assert (y.shape, y.dtype) == ((0, convolution.rows, 5, 4), torch.float16)
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("family", "limit"),
    [(MmaSparse(), 1 << 28), (MmaDense(), 1 << 28), (Depthwise(), 1 << 31), (WgmmaSparse(), 1 << 31)],
)
def test_more_pixels_than_a_kernel_can_count_do_not_fit(family, limit, monkeypatch):
    monkeypatch.setattr(driver, "processors", lambda device: 132)

    def fits(operation, *shape):
        return family.fits([torch.empty(shape, dtype=torch.float16, device="meta")], operation, "128x128")

    side = math.isqrt(limit - 1)
    assert fits(Convolution(8, 8), 1, 8, side, side)
    assert not fits(Convolution(8, 8, padding=(1, 1)), 1, 8, side, side)  # the result has more pixels
    for count in (limit, limit - 1):
        assert fits(Convolution(8, 8), count, 8, 1, 1) is (count < limit)
        assert fits(Linear(8, 8), count, 8) is (count < limit)


@pytest.mark.parametrize(("family", "convolution"), LAYERS, ids=lambda value: getattr(value, "name", ""))
def test_packed_weights_are_aligned(family, convolution):
    packed = family.pack(convolution, tensors(convolution))
    for name in family.packed_shapes(convolution):
        check_aligned(name, packed[name])


def test_weights_that_are_not_aligned_are_refused():
    values = torch.zeros(64, dtype=torch.float16)
    check_aligned("values", values[8:])
    with pytest.raises(EngineError, match="the values must be aligned to 16 bytes, got an offset of 6"):
        check_aligned("values", values[3:])
