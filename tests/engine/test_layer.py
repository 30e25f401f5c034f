import pytest
import torch

from halve.engine.geometry import Geometry
from halve.engine.kernels.mma_sp.launch import TILES
from halve.engine.layer import Layer
from tests.random_masks import random


def two_of_four(*shape):
    weight = random(*shape)
    weight[:, [1, 3]] = 0
    return weight


def conv_layer(dtype=torch.float32, activation="relu"):
    weight = two_of_four(8, 4, 3, 3).to(dtype)
    geometry = Geometry(8, 4, (3, 3), padding=(1, 1), activation=activation)
    return Layer("conv", geometry, weight, random(8, seed=1).to(dtype), linear=False)


@pytest.mark.parametrize("way", ["torch", "cudnn", "gemm", "sparse 64x64", "twin 32x32k8"])
@pytest.mark.parametrize("linear", [False, True])
def test_every_way_gives_the_same(way, linear):
    x, residual = random(2, 4, 5, 5, seed=2), random(2, 8, 5, 5, seed=3)
    layer = conv_layer()
    if linear:
        layer = Layer("fc", Geometry(8, 4, activation="gelu"), two_of_four(8, 4), random(8, seed=1), linear=True)
        x, residual = random(2, 3, 4, seed=2), random(2, 3, 8, seed=3)
    expected = layer(x, residual)
    layer.take({1: way})
    torch.testing.assert_close(layer(x, residual), expected)
    torch.testing.assert_close(layer(x), Layer.forward(layer, x, torch.zeros_like(residual)))


def test_the_nearest_size_that_was_planned_decides():
    layer = conv_layer()
    layer.take({25: "torch", 1000: "sparse 64x64"})
    assert [layer.way_for(pixels) for pixels in (1, 25, 100, 200, 5000)] == [
        *("torch", "torch", "torch", "sparse 64x64", "sparse 64x64")
    ]


def test_only_what_is_needed_is_held_and_nothing_is_lost():
    layer = conv_layer()
    weight = layer.dense().clone()
    for way, held in (("sparse 64x64", {"values", "metadata"}), ("twin 64x64", {"twin"}), ("cudnn", {"weight"})):
        layer.take({1: way})
        forms = {name for name in ("weight", "values", "metadata", "twin") if getattr(layer, name) is not None}
        assert forms == held
        assert torch.equal(layer.dense(), weight)


def test_which_ways_are_possible():
    ways = conv_layer(torch.float16).possible()
    assert ways[:2] == ["torch", "cudnn"]
    assert len(ways) == 2 + 2 * len(TILES)
    assert conv_layer(torch.float32).possible() == ["torch", "cudnn"]
    dense = Layer("fc", Geometry(8, 4), random(8, 4).half(), None, linear=True)
    assert not dense.halved
    assert dense.possible(twins=False) == ["torch", "gemm"]
    grouped = Layer("g", Geometry(8, 2, groups=2), random(8, 2, 1, 1).half(), None, linear=False)
    assert grouped.possible() == ["torch"]
