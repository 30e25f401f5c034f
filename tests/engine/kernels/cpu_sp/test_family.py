"""The kernels compute what the reference does, on layers of real networks and on odd ones."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halve.engine.kernels.cpu_sp import features, memory
from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.planes import is_planes
from halve.engine.operations import Convolution, Linear, MaxPool, PooledConvolution
from halve.errors import MaskError
from tests.engine.kernels.cpu_sp.layers import (
    FAMILIES,
    TOLERANCE,
    check,
    random,
    relative_error,
    run,
    two_of_four,
    weights_of,
)

CPU = torch.device("cpu")
cpu_kernels = pytest.mark.cpu_kernels
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def conv(rows, channels, kernel, stride=1, activation="relu"):
    return Convolution(
        rows, channels, (kernel, kernel), (stride, stride), (kernel // 2, kernel // 2), activation=activation
    )


LAYERS = [  # of ResNets and ConvNeXts, at all their sizes, with fewer channels where there are many pixels
    (conv(64, 64, 3), (1, 64, 56, 56), False),
    (conv(64, 16, 1), (2, 16, 56, 56), True),
    (conv(48, 32, 3, 2), (1, 32, 56, 56), False),
    (conv(64, 32, 1, 2, "none"), (1, 32, 56, 56), False),
    (conv(128, 64, 3), (2, 64, 28, 28), True),
    (conv(256, 256, 3), (1, 256, 14, 14), False),
    (conv(96, 128, 3, 2), (1, 128, 14, 14), False),
    (conv(512, 128, 3), (1, 128, 7, 7), True),
    (conv(64, 2048, 1), (3, 2048, 7, 7), False),
    (conv(2048, 64, 1), (1, 64, 7, 7), True),
    (Convolution(64, 48, (2, 2), (2, 2)), (1, 48, 28, 28), False),  # ConvNeXt's downsampling
    (Linear(384, 96, "gelu"), (1, 28, 28, 96), False),
    (Linear(96, 384), (2, 14, 14, 384), True),
    (Linear(96, 384, scaled=True), (2, 14, 14, 384), True),  # ConvNeXt's layer scale
]


@cpu_kernels
@both_dtypes
@pytest.mark.parametrize(("operation", "shape", "residual"), LAYERS, ids=[str(layer[0]) for layer in LAYERS])
def test_layers_of_real_networks(operation, shape, residual, dtype):
    check(operation, shape, dtype=dtype, residual=residual)


@cpu_kernels
@pytest.mark.parametrize(("operation", "shape", "residual"), LAYERS, ids=[str(layer[0]) for layer in LAYERS])
def test_layers_of_real_networks_with_avx2(operation, shape, residual):
    check(operation, shape, residual=residual, variant="avx2")


@cpu_kernels
@both_dtypes
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6])
def test_dense_weights_of_first_layers(channels, dtype):
    check(conv(24, channels, 7, 2), (2, channels, 33, 32), "cpu", dtype)


@cpu_kernels
@both_dtypes
@pytest.mark.parametrize("shape", [(1, 3, 30, 37), (3, 3, 30, 37), (3, 3, 64, 64)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_first_layer_with_pooling(shape, memory_format, dtype):
    operation = PooledConvolution(24, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
    family, tensors = FAMILIES["cpu"], weights_of(operation.convolution, "cpu", dtype)
    assert family.variants(Piece(operation, dtype), CPU) == ("avx512",)
    x = random(*shape).to(dtype, memory_format=memory_format)
    packed = family.pack(operation, tensors)
    y = family.run(family.laid_out([x], operation), packed, operation, "avx512")
    assert is_planes(y, 1)
    expected = operation.reference([x.float()], {name: tensor.float() for name, tensor in tensors.items()})
    assert float((y - expected).norm() / expected.norm()) < TOLERANCE[dtype]


sizes = st.tuples(st.integers(1, 5), st.integers(1, 5))
steps = st.tuples(st.integers(1, 3), st.integers(1, 3))


@cpu_kernels
@settings(max_examples=80)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 60),
    st.integers(1, 8),
    sizes,
    steps,
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    steps,
    st.sampled_from(["none", "relu", "hardswish"]),
    st.sampled_from(["cpu_sp", "cpu"]),
    st.sampled_from([(dtype, "avx512") for dtype in TOLERANCE] + [(torch.float32, "avx2")]),
    st.booleans(),
    st.booleans(),
)
def test_convolutions_of_any_geometry(
    images, rows, groups, kernel, stride, padding, dilation, activation, family, computed, residual, bias
):
    number, height, width = images
    operation = Convolution(rows, 4 * groups, kernel, stride, padding, dilation, activation=activation)
    shape = (number, 4 * groups, height, width)
    assume(min(operation.out_shape(shape)) > 0)
    dtype, variant = computed
    check(operation, shape, family, dtype, residual, bias, variant)


@cpu_kernels
@given(
    st.lists(st.integers(1, 5), max_size=3),
    st.integers(1, 70),
    st.integers(1, 8),
    st.sampled_from(["none", "relu", "gelu", "silu"]),
    st.sampled_from(list(TOLERANCE)),
    st.booleans(),
)
def test_linear_layers_of_any_shape(leading, rows, groups, activation, dtype, residual):
    check(Linear(rows, 4 * groups, activation), (*leading, 4 * groups), dtype=dtype, residual=residual)


@cpu_kernels
@both_dtypes
def test_inputs_of_any_memory_format_and_alignment(dtype):
    operation, (weights, x) = conv(20, 8, 3), (weights_of(conv(20, 8, 3), dtype=dtype), random(2, 8, 9, 7).to(dtype))
    expected = run(operation, weights, [x])
    shifted = torch.zeros(x.numel() + 1, dtype=dtype)[1:].reshape(x.shape).copy_(x)
    cut = torch.zeros(2, 12, 9, 7, dtype=dtype)[:, 2:10].copy_(x)
    for given_x in (x.to(memory_format=torch.channels_last), shifted, cut, x.transpose(2, 3).contiguous().mT):
        assert torch.equal(run(operation, weights, [given_x]), expected)


@cpu_kernels
def test_empty_batches_have_empty_results():
    assert run(conv(20, 8, 3), weights_of(conv(20, 8, 3)), [torch.zeros(0, 8, 5, 5)]).shape == (0, 20, 5, 5)
    assert run(Linear(20, 8), weights_of(Linear(20, 8)), [torch.zeros(0, 8)]).shape == (0, 20)


@cpu_kernels
@both_dtypes
def test_not_a_number_spreads_as_in_pytorch_and_infinity_stays(dtype):
    operation = conv(4, 4, 3)
    tensors = {"weight": torch.zeros(4, 4, 3, 3, dtype=dtype), "bias": torch.zeros(4)}
    tensors["weight"][:, :2] = 1
    x = torch.zeros(1, 4, 5, 5, dtype=dtype)
    x[0, 0, 0, 0], x[0, 1, 4, 4], x[0, 2, 2, 2] = torch.nan, torch.inf, torch.nan
    y = run(operation, tensors, [x])
    expected = operation.reference([x[:, :2]], {"weight": tensors["weight"][:, :2]})
    assert torch.equal(y.isnan(), expected.isnan())  # channel 2 is not kept, and not multiplied
    assert torch.equal(y.isposinf(), expected.isposinf())


@cpu_kernels
@both_dtypes
@pytest.mark.parametrize("operation", [conv(20, 8, 3, 2), Linear(20, 8, "gelu")])
def test_fake_results_have_the_strides_of_real_ones(operation, dtype):
    family = FAMILIES["cpu_sp"]
    x = random(3, 8, 9, 9).to(dtype) if operation.channel_dim == 1 else random(3, 5, 8).to(dtype)
    packed = family.pack(operation, weights_of(operation, dtype=dtype))
    fake, real = family.fake([x], packed, operation), run(operation, weights_of(operation, dtype=dtype), [x])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert is_planes(real, operation.channel_dim)


def test_without_avx512_a_reference_runs():
    operation, x = conv(20, 8, 3), random(2, 8, 5, 5)
    tensors = weights_of(operation)
    assert "this CPU has no avx512f" in FAMILIES["cpu_sp"].unavailable(CPU, torch.float32)
    y = run(operation, tensors, [x])
    assert relative_error(y, operation, tensors, [x]) <= 1e-5
    assert is_planes(y, 1)
    packed = {name: tensor.to("meta") for name, tensor in FAMILIES["cpu_sp"].pack(operation, tensors).items()}
    assert FAMILIES["cpu_sp"].run([x.to("meta")], packed, operation, "avx512").is_meta


@cpu_kernels
def test_a_cpu_with_avx2_alone(monkeypatch):
    monkeypatch.setattr(features, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    sparse, dense = FAMILIES["cpu_sp"], FAMILIES["cpu"]
    assert sparse.unavailable(CPU, torch.float32) is None
    assert "need AVX-512 in torch.bfloat16" in sparse.unavailable(CPU, torch.bfloat16)
    assert sparse.variants(Piece(conv(8, 8, 3), torch.float32, is_2_4=True), CPU) == ("avx2",)
    assert sparse.variants(Piece(conv(8, 8, 3), torch.bfloat16, is_2_4=True), CPU) == ()
    stem = PooledConvolution(24, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
    assert dense.variants(Piece(stem, torch.float32), CPU) == ()
    check(conv(20, 8, 3, 2), (2, 8, 9, 7))  # planned for AVX-512, on another machine
    tensors, x = weights_of(stem.convolution, "cpu"), random(1, 3, 30, 30)
    torch.testing.assert_close(
        dense.run([x], dense.pack(stem, tensors), stem, "avx512"), stem.reference([x], tensors), rtol=1e-4, atol=1e-4
    )


def test_reasons(monkeypatch):
    family = FAMILIES["cpu_sp"]
    assert family.unavailable(torch.device("cuda"), torch.float32) == "our CPU kernels need a CPU, got cuda"
    assert "float32 or torch.bfloat16, got torch.float16" in family.unavailable(CPU, torch.float16)
    monkeypatch.setattr(features, "cpu_flags", lambda: frozenset({"avx512f", "avx512bw", "avx512vl"}))
    assert "has no avx512_bf16" in family.unavailable(CPU, torch.bfloat16)
    monkeypatch.setattr(memory, "unavailable", lambda: "the system refuses executable memory")
    assert family.unavailable(CPU, torch.float32) == "the system refuses executable memory"


@cpu_kernels
def test_variants():
    sparse, dense = FAMILIES["cpu_sp"], FAMILIES["cpu"]
    assert sparse.variants(Piece(conv(8, 8, 3), torch.float32, is_2_4=True), CPU) == ("avx512",)
    for piece in (
        Piece(conv(8, 8, 3), torch.float32),
        Piece(conv(8, 6, 3), torch.float32, is_2_4=True),
        Piece(Convolution(8, 4, groups=2), torch.float32, is_2_4=True),
        Piece(conv(8, 8, 3), torch.float16, is_2_4=True),
        Piece(Linear(25088, 4096), torch.float32, is_2_4=True),  # its code would take half a gigabyte
        Piece(MaxPool((2, 2), (2, 2), (0, 0), (1, 1), False), torch.float32),
    ):
        assert sparse.variants(piece, CPU) == ()
    assert dense.variants(Piece(conv(8, 3, 3), torch.float32), CPU) == ("avx512",)


def test_dense_layers_need_a_vector_of_pixels():
    one, many = [random(8, 16)], [random(16, 16)]
    assert not FAMILIES["cpu"].fits(one, Linear(20, 16), "avx512")
    assert FAMILIES["cpu"].fits(many, Linear(20, 16), "avx512")
    assert FAMILIES["cpu_sp"].fits(one, Linear(20, 16), "avx512")


def test_a_weight_that_is_not_2_4_is_refused():
    with pytest.raises(MaskError, match="keeps more than two"):
        FAMILIES["cpu_sp"].pack(Linear(4, 8), {"weight": random(4, 8)})
    assert FAMILIES["cpu_sp"].pack(Linear(4, 8), {"weight": two_of_four(4, 8)}).keys() == {"values", "codes"}
