"""What all CUDA families for convolutions do before they launch a kernel."""

import pytest
import torch

from halve.engine.kernels.cuda.convolution import ConvolutionFamily
from halve.engine.kernels.depthwise.family import Depthwise
from halve.engine.kernels.mma_sp.family import MmaDense, MmaSparse
from halve.engine.kernels.wgmma_sp.family import WgmmaDense, WgmmaSparse
from halve.engine.operations import Convolution
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
