import torch

from halve.engine.kernels.dense.family import Dense
from halve.engine.kernels.kernel import Piece
from halve.engine.operations import Convolution, Linear, MaxPool
from tests.random_masks import random

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def variants(operation, device=GPU):
    return list(Dense().variants(Piece(operation, torch.float16), device))


def test_variants_are_those_that_the_libraries_support():
    assert variants(Convolution(8, 4, (3, 3), activation="relu")) == ["torch", "cudnn"]
    assert variants(Convolution(8, 4, activation="relu")) == ["torch", "cudnn", "gemm"]
    assert variants(Convolution(8, 4, groups=2)) == ["torch"]
    assert variants(Linear(8, 4)) == ["torch", "gemm"]
    assert variants(MaxPool((2, 2), (2, 2), (0, 0), (1, 1), False)) == ["torch"]
    assert variants(Convolution(8, 4, activation="relu"), CPU) == ["torch"]


def test_weights_are_channels_last_and_biases_are_rounded_once():
    conv, weight, bias = Convolution(8, 4, (3, 3)), random(8, 4, 3, 3).half(), random(8, seed=1)
    packed = Dense().pack(conv, {"weight": weight, "bias": bias})
    assert packed["weight"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(packed["rounded_bias"], bias.half())
    exact = Dense().pack(conv, {"weight": weight.float(), "bias": bias})
    assert "rounded_bias" not in exact
