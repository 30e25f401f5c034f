import pytest
import torch
import torch.nn.functional as F

from halve.engine.operations import ACTIVATIONS, Convolution, Linear, MaxPool, Operation
from tests.random_masks import random


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_applies_layer_bias_residual_activation_in_that_order(activation, residual, bias):
    x, w, b, r = random(2, 6, 5, 5), random(4, 3, 3, 3, seed=1), random(4, seed=2), random(2, 4, 3, 3, seed=3)
    tensors = {"weight": w, "bias": b} if bias else {"weight": w}
    conv = Convolution(4, 3, (3, 3), (2, 2), (1, 1), groups=2, activation=activation)
    expected = F.conv2d(x, w, b if bias else None, 2, 1, 1, 2)
    expected = expected + r if residual else expected
    got = conv.reference([x, r] if residual else [x], tensors)
    assert torch.equal(got, ACTIVATIONS[activation].function(expected))
    rows, sums, matrix = random(3, 7, 6), random(3, 7, 4, seed=3), random(4, 6, seed=1)
    tensors = {**tensors, "weight": matrix}
    expected = F.linear(rows, matrix, b if bias else None)
    expected = expected + sums if residual else expected
    got = Linear(4, 6, activation).reference([rows, sums] if residual else [rows], tensors)
    assert torch.equal(got, ACTIVATIONS[activation].function(expected))


OPERATIONS = [
    (Convolution(4, 3, (3, 2), (2, 1), (1, 0), (1, 2), groups=2, activation="relu"), (2, 6, 7, 9), (4, 3, 3, 2)),
    (Linear(4, 6, "gelu"), (3, 7, 6), (4, 6)),
    (MaxPool((3, 2), (2, 1), (1, 0), (1, 2), True), (2, 8, 7, 6), None),
]


@pytest.mark.parametrize(("operation", "shape", "weight"), OPERATIONS, ids=lambda x: type(x).__name__)
def test_out_shape_matches_the_reference_and_json_round_trips(operation, shape, weight):
    x = random(*shape)
    tensors = {} if weight is None else {"weight": random(*weight)}
    assert operation.reference([x], tensors).shape == operation.out_shape(shape)
    assert Operation.from_json(operation.to_json()) == operation
    assert operation.size(x) == x.numel() // (6 if weight else 8)
    assert str(shape[-1]) in operation.describe(x) or isinstance(operation, Linear)


def test_a_linear_layer_is_a_convolution_over_rows():
    linear, x, w = Linear(4, 6, "silu"), random(5, 6), random(4, 6, seed=1)
    image = x.T[None, :, :, None]
    got = linear.convolution.reference([image], {"weight": w[:, :, None, None]})
    torch.testing.assert_close(got[0, :, :, 0].T, linear.reference([x], {"weight": w}))
    assert linear.describe(x) == "6>4 1x1 at 5"
    assert linear.describe(random(2, 7, 7, 6)) == "6>4 1x1 at 2 x 7 x 7"
    assert linear.pointwise
    assert linear.convolution.pointwise


def test_a_bias_is_added_in_the_weights_dtype():
    x, w, b = random(2, 4).half(), random(3, 4, seed=1).half(), random(3, seed=2)
    assert Linear(3, 4).reference([x], {"weight": w, "bias": b}).dtype == torch.float16
