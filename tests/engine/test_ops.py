import pytest
import torch
import torch.nn.functional as F

from halve.engine import ops
from tests.random_masks import random


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_is_layer_bias_residual_activation_in_that_order(activation, residual, bias):
    x, w, b = random(2, 6, 5, 5), random(4, 3, 3, 3, seed=1), random(4, seed=2)
    r = random(2, 4, 3, 3, seed=3)
    got = ops.conv2d(x, w, b if bias else None, r if residual else None, [2, 2], [1, 1], [1, 1], 2, activation)
    expected = F.conv2d(x, w, b if bias else None, 2, 1, 1, 2)
    expected = expected + r if residual else expected
    assert torch.equal(got, ops.ACTIVATIONS[activation](expected))
    rows, matrix, sums = random(3, 7, 6), random(4, 6, seed=1), random(3, 7, 4, seed=3)
    got = ops.linear(rows, matrix, b if bias else None, sums if residual else None, activation)
    expected = F.linear(rows, matrix, b if bias else None)
    expected = expected + sums if residual else expected
    assert torch.equal(got, ops.ACTIVATIONS[activation](expected))


@pytest.mark.filterwarnings("ignore")
def test_torch_finds_nothing_wrong_with_the_operations():
    x, w, b, r = random(2, 6, 5, 5), random(4, 6, 3, 3, seed=1), random(4, seed=2), random(2, 4, 5, 5, seed=3)
    for bias, residual in ((None, None), (b, r)):
        arguments = (x, w, bias, residual, [1, 1], [1, 1], [1, 1], 1, "relu")
        torch.library.opcheck(torch.ops.halve.conv2d.default, arguments)
    torch.library.opcheck(torch.ops.halve.linear.default, (random(3, 6), random(4, 6, seed=1), b, None, "gelu"))


def test_an_operation_is_exported_with_a_free_batch():
    class Net(torch.nn.Module):
        def forward(self, x, w):
            return ops.conv2d(x, w, None, None, [1, 1], [1, 1], [1, 1], 1, "relu")

    arguments = random(2, 4, 5, 5), random(8, 4, 3, 3)
    program = torch.export.export(Net(), arguments, dynamic_shapes=({0: torch.export.Dim("batch")}, None), strict=False)
    x = random(5, 4, 5, 5, seed=1)
    assert torch.equal(program.module()(x, arguments[1]), Net()(x, arguments[1]))
