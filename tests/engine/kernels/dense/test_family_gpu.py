"""Library kernels compared with float64, and opcheck of the operator, on a GPU."""

import pytest
import torch

from halve.engine.kernels.dense.family import Dense
from halve.engine.kernels.kernel import Piece
from halve.engine.operations import ACTIVATIONS, Convolution, Linear, MaxPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random(*shape, dtype=torch.float16, seed=0):
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def check(operation, inputs, tensors):
    dtype = tensors["weight"].dtype
    variants = Dense().variants(Piece(operation, dtype), torch.device("cuda"))
    packed = Dense().pack(operation, tensors)
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected = operation.reference([x.double() for x in inputs], wide)
    sizes = [x.double().abs() for x in inputs], {name: tensor.abs() for name, tensor in wide.items()}
    scale = type(operation)(**{**vars(operation), "activation": "none"}).reference(*sizes)
    for variant in variants:
        got = Dense().run(inputs, packed, operation, variant)
        assert bool(((got.double() - expected).abs() <= TOLERANCE[dtype] * scale).all()), variant
    return variants


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_convolutions_agree_with_float64(activation, dtype):
    for size in (1, 3):
        conv = Convolution(40, 24, (size, size), padding=(size // 2, size // 2), activation=activation)
        x, w = random(2, 24, 7, 5, dtype=dtype), random(40, 24, size, size, dtype=dtype, seed=1)
        b, r = random(40, dtype=torch.float32, seed=2), random(2, 40, 7, 5, dtype=dtype, seed=3)
        for inputs in ([x], [x, r]):
            for tensors in ({"weight": w}, {"weight": w, "bias": b}):
                found = check(conv, inputs, tensors)
        assert ("gemm" in found) == (size == 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_layers_agree_with_float64(activation, dtype):
    x, w = random(3, 7, 24, dtype=dtype), random(40, 24, dtype=dtype, seed=1)
    b, r = random(40, dtype=torch.float32, seed=2), random(3, 7, 40, dtype=dtype, seed=3)
    for inputs in ([x], [x, r]):
        assert check(Linear(40, 24, activation), inputs, {"weight": w, "bias": b}) == ["torch", "gemm"]


@pytest.mark.filterwarnings("ignore")
def test_opcheck_passes():
    conv, linear = Convolution(40, 24, activation="relu"), Linear(40, 24, "relu")
    pool = MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False)
    w, b, r = random(40, 24, 1, 1, seed=1), random(40, seed=2), random(2, 40, 7, 5, seed=3)
    for operation, inputs, tensors, family, variants in (
        (conv, [random(2, 24, 7, 5), r], {"weight": w, "bias": b}, "dense", ("torch", "cudnn", "gemm")),
        (linear, [random(3, 7, 24)], {"weight": w.flatten(1), "bias": b}, "dense", ("torch", "gemm")),
        (pool, [random(2, 16, 13, 9)], {}, "pool", ("nhwc",)),
    ):
        for variant in variants:
            arguments = (inputs, list(tensors.values()), " ".join(tensors), operation.to_json(), family, variant)
            torch.library.opcheck(torch.ops.halve.run_kernel.default, arguments)
