import pytest
import torch

from halve.engine.kernels import op
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FAMILIES
from halve.engine.operations import Convolution, Linear, MaxPool
from halve.errors import EngineError
from tests.random_masks import random


def halved(*shape):
    weight = random(*shape, seed=1)
    weight[:, [0, 2]] = 0
    return weight


CASES = [
    (Convolution(8, 4, (3, 3), padding=(1, 1), activation="relu"), "dense", "torch"),
    (Convolution(8, 4, (3, 3), padding=(1, 1), activation="silu"), "mma_sp", "64x64"),
    (Convolution(8, 4, (3, 3), padding=(1, 1), activation="none"), "mma", "64x64"),
    (Linear(8, 4, "gelu"), "dense", "torch"),
    (Linear(8, 4, "none"), "mma_sp", "64x64"),
    (MaxPool((3, 2), (2, 1), (1, 0), (1, 2), True), "dense", "torch"),
    (MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False), "pool", "nhwc"),
]


def case(operation, family, residual, bias):
    linear, pool = isinstance(operation, Linear), isinstance(operation, MaxPool)
    x = random(3, 5, 4) if linear else random(2, 4, 7, 6)
    inputs = [x, random(*operation.out_shape(x.shape), seed=3)] if residual and not pool else [x]
    tensors = {} if pool else {"weight": halved(*operation.weight_shape)}
    if bias and not pool:
        tensors["bias"] = random(8, seed=2)
    return inputs, FAMILIES[family].pack(operation, tensors), tensors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("operation", "family", "variant"), CASES)
def test_opcheck_passes(operation, family, variant):
    for full in (False, True):
        inputs, packed, _ = case(operation, family, residual=full, bias=full)
        arguments = (inputs, list(packed.values()), " ".join(packed), operation.to_json(), family, variant)
        torch.library.opcheck(torch.ops.halve.run_kernel.default, arguments)


@pytest.mark.parametrize(("operation", "family", "variant"), CASES)
def test_every_kernel_matches_the_reference(operation, family, variant):
    for residual, bias in ((False, False), (False, True), (True, False), (True, True)):
        inputs, packed, tensors = case(operation, family, residual, bias)
        got = op.call(inputs, packed, operation.to_json(), Kernel(family, variant))
        torch.testing.assert_close(got, operation.reference(inputs, tensors))


def test_it_can_be_exported_with_a_dynamic_batch_size():
    conv = Convolution(8, 4, (3, 3), padding=(1, 1), activation="relu")

    class Net(torch.nn.Module):
        def forward(self, x, weight):
            return op.call([x], {"weight": weight}, conv.to_json(), Kernel("dense", "torch"))

    arguments = random(2, 4, 5, 5), random(8, 4, 3, 3)
    program = torch.export.export(Net(), arguments, dynamic_shapes=({0: torch.export.Dim("batch")}, None), strict=False)
    x = random(5, 4, 5, 5, seed=1)
    assert torch.equal(program.module()(x, arguments[1]), Net()(x, arguments[1]))


def test_an_unknown_family_raises():
    with pytest.raises(
        EngineError, match="unknown kernel family 'wgmma_9000': this version of halve has dense, wgmma_sp"
    ):
        op.call([random(1, 4)], {}, Linear(2, 4).to_json(), Kernel("wgmma_9000", "1x1"))
