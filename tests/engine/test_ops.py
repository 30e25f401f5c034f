import pytest
import torch
import torch.nn.functional as F

from halve.engine import ops
from halve.engine.kernels.mma_sp.packing import pack, pack_dense
from halve.errors import EngineError
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_torch_finds_nothing_wrong_with_pooling(memory_format):
    x = random(2, 8, 7, 6).contiguous(memory_format=memory_format)
    torch.library.opcheck(torch.ops.halve.max_pool2d.default, (x, [3, 2], [2, 1], [1, 0], [1, 2], True))


def test_an_operation_is_exported_with_a_free_batch():
    class Net(torch.nn.Module):
        def forward(self, x, w):
            return ops.conv2d(x, w, None, None, [1, 1], [1, 1], [1, 1], 1, "relu")

    arguments = random(2, 4, 5, 5), random(8, 4, 3, 3)
    program = torch.export.export(Net(), arguments, dynamic_shapes=({0: torch.export.Dim("batch")}, None), strict=False)
    x = random(5, 4, 5, 5, seed=1)
    assert torch.equal(program.module()(x, arguments[1]), Net()(x, arguments[1]))


def halved(*shape):
    weight = random(*shape, seed=1)
    weight[:, [0, 2]] = 0
    return weight


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_packed_operations_give_what_the_plain_ones_give(sparse, residual):
    x, w, b, r = random(2, 4, 5, 6), halved(7, 4, 3, 2), random(7, seed=2), random(2, 7, 3, 7, seed=3)
    values, metadata = pack(w, w != 0)[:2] if sparse else (pack_dense(w), None)
    r = r if residual else None
    sizes = ([2, 1], [1, 1], [1, 1])
    got = ops.packed_conv2d(x, values, metadata, b, r, [7, 4, 3, 2], *sizes, "silu", "64x64")
    torch.testing.assert_close(got, ops.conv2d(x, w, b, r, *sizes, 1, "silu"))
    assert got.is_contiguous(memory_format=torch.channels_last)
    rows, matrix, sums = random(3, 5, 4), halved(7, 4), random(3, 5, 7, seed=3)
    values, metadata = pack(matrix, matrix != 0)[:2] if sparse else (pack_dense(matrix), None)
    sums = sums if residual else None
    got = ops.packed_linear(rows, values, metadata, b, sums, 7, "gelu", "64x64")
    torch.testing.assert_close(got, ops.linear(rows, matrix, b, sums, "gelu"))


@pytest.mark.filterwarnings("ignore")
def test_torch_finds_nothing_wrong_with_the_packed_operations():
    x, w, b, r = random(2, 4, 5, 5), halved(8, 4, 3, 3), random(8, seed=2), random(2, 8, 5, 5, seed=3)
    values, metadata, shape = pack(w, w != 0)
    arguments = (x, values, metadata, b, r, list(shape), [1, 1], [1, 1], [1, 1], "relu", "64x64")
    torch.library.opcheck(torch.ops.halve.packed_conv2d.default, arguments)
    values, metadata, _ = pack(w[..., 0, 0], w[..., 0, 0] != 0)
    torch.library.opcheck(
        torch.ops.halve.packed_linear.default, (random(3, 4), values, metadata, b, None, 8, "none", "64x64")
    )


def test_what_a_kernel_would_read_wrongly_is_refused():
    w = halved(8, 4, 3, 3)
    values, metadata, shape = pack(w, w != 0)
    sizes = (list(shape), [1, 1], [1, 1], [1, 1], "relu", "64x64")
    x = random(2, 4, 5, 5)
    for bad, bias, why in (
        (x[0], None, "N, C, H, W"),
        (x[:, :2], None, "images of 4 channels"),
        (x.double(), None, "convert the input"),
        (x, random(8).double(), "float32"),
        (x, random(7), "8 numbers"),
    ):
        with pytest.raises(EngineError, match=why):
            ops.packed_conv2d(bad, values, metadata, bias, None, *sizes)


def test_what_a_kernel_would_read_past_is_refused():
    weight = random(16, 64, 3, 3) * (torch.arange(64) % 4 < 2).reshape(1, -1, 1, 1)
    values, metadata, shape = pack(weight, weight != 0)
    x, sizes = random(1, 64, 4, 4), ([1, 1], [1, 1], [1, 1], "none", "64x64")

    def refused(match, values=values, metadata=metadata, bias=None):
        with pytest.raises(EngineError, match=match):
            ops.packed_conv2d(x, values, metadata, bias, None, list(shape), *sizes)

    refused(r"values .* have shape \(1, 18, 32, 8\)", values=values[:, :2])
    refused(r"without gaps", values=values.to(memory_format=torch.channels_last))
    refused(r"metadata .* have shape", metadata=metadata[:, :2])
    refused(r"int32", metadata=metadata.long())
    refused(r"bias must be", bias=torch.zeros(32)[::2])
