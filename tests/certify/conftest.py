"""A small network, its masks and images, for tests of proofs."""

import pytest
import torch

import halve
from tests.tiny import convnet


@pytest.fixture(scope="module")
def model():
    return convnet()


@pytest.fixture(scope="module")
def masks(model):
    return halve.prune(model)


@pytest.fixture(scope="module")
def pictures(model, masks):
    """Images with pixels in 0..1 for which both networks agree."""
    x = torch.rand(12, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        agree = halve.apply(model, masks)(x).argmax(1) == model(x).argmax(1)
    return x[agree][:4]
