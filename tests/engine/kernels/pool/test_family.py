import torch

from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.pool.family import Pool
from halve.engine.operations import Linear, MaxPool
from tests.random_masks import random

WINDOW = MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False)


def test_supported_operations():
    gpu = torch.device("cuda")
    assert tuple(Pool().variants(Piece(WINDOW, torch.float16), gpu)) == ("nhwc",)
    assert tuple(Pool().variants(Piece(WINDOW, torch.float32), gpu)) == ()
    assert tuple(Pool().variants(Piece(Linear(4, 4), torch.float16), gpu)) == ()


def test_without_a_gpu_it_falls_back_to_pytorch():
    x = random(2, 8, 9, 9)
    assert torch.equal(Pool().run([x], {}, WINDOW, "nhwc"), WINDOW.reference([x], {}))
