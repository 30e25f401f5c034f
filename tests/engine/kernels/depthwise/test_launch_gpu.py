"""Depthwise convolutions against float64, on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from halve.cuda_graphs import record
from halve.engine.kernels.depthwise.family import Depthwise
from halve.engine.kernels.kernel import Piece
from halve.engine.layer_times import Jobs, compile_all
from halve.engine.operations import ACTIVATIONS, Convolution
from halve.errors import EngineError

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or Depthwise().unavailable(GPU, torch.float16) is not None,
        reason="needs a GPU from 8.0 on",
    ),
]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def conv(channels, kernel, stride=1, padding=None, **others):
    pad = kernel // 2 if padding is None else padding
    return Convolution(channels, 1, (kernel,) * 2, (stride,) * 2, (pad,) * 2, groups=channels, **others)


LAYERS = [  # operation; images, height, width
    (conv(96, 7), (2, 56, 56)),  # ConvNeXt-T
    (conv(192, 7), (3, 28, 28)),
    (conv(384, 7), (5, 14, 14)),
    (conv(768, 7), (40, 7, 7)),
    (conv(16, 3, activation="relu"), (1, 112, 112)),  # MobileNetV3-L
    (conv(64, 3, 2, activation="relu"), (2, 112, 112)),
    (conv(72, 5, 2, activation="relu"), (2, 56, 56)),
    (conv(120, 5, activation="relu"), (3, 28, 28)),
    (conv(184, 3, activation="hardswish"), (9, 14, 14)),
    (conv(672, 5, 2, activation="hardswish"), (3, 14, 14)),
    (conv(960, 5, activation="hardswish"), (33, 7, 7)),
    (conv(144, 3, activation="silu"), (2, 56, 56)),  # EfficientNet-B0
    (conv(240, 3, 2, activation="silu"), (4, 28, 28)),
    (conv(1152, 5, activation="silu"), (17, 7, 7)),
    (conv(8, 3), (1, 1, 1)),  # odd shapes
    (conv(17, 3, 2, activation="gelu"), (3, 9, 5)),
    (conv(24, 5, padding=0), (2, 5, 40)),
    (conv(136, 7, padding=8), (2, 3, 2)),
    (conv(40, 7, 2), (2, 13, 29)),
    (conv(40, 5, padding=1), (300, 4, 4)),
]


def problem(operation, size, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    rows, kernel = operation.rows, operation.kernel
    weight = torch.randn(rows, 1, *kernel, generator=generator, device=GPU) / kernel[0]
    tensors = {"weight": weight.to(dtype), "bias": torch.randn(rows, generator=generator, device=GPU)}
    if operation.scaled:
        tensors["scale"] = torch.randn(rows, generator=generator, device=GPU)
    x = torch.randn(size[0], rows, *size[1:], generator=generator, device=GPU).to(dtype)
    return x.contiguous(memory_format=torch.channels_last), tensors


def variants(operation, dtype):
    return Depthwise().variants(Piece(operation, dtype), GPU)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile all kernels in several threads: one after the other takes minutes."""
    jobs: Jobs = {}
    for operation, _ in LAYERS:
        for dtype in TOLERANCE:
            for variant in variants(operation, dtype):
                job = Depthwise().compilation([torch.empty(1, device=GPU, dtype=dtype)], operation, variant)
                jobs[job.func, job.args] = job
    compile_all(jobs)


def error(got, inputs, tensors, operation):
    """The largest error relative to the sum of all absolute values that make up a result."""
    x, *added = (tensor.double() for tensor in inputs)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    geometry = (operation.stride, operation.padding, 1, operation.groups)
    sizes = F.conv2d(x.abs(), exact["weight"].abs(), exact["bias"].abs(), *geometry)
    scale = exact["scale"].reshape(-1, 1, 1) if operation.scaled else 1.0
    y = F.conv2d(x, exact["weight"], exact["bias"], *geometry) * scale
    sizes = sizes * abs(scale) + sum(tensor.abs() for tensor in added)
    expected = ACTIVATIONS[operation.activation].function(y + sum(added))
    return float(((got.double() - expected).abs() / sizes).nan_to_num(1e9).max())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("operation", "size"), LAYERS, ids=lambda value: str(value) if len(str(value)) < 20 else "")
def test_results(operation, size, dtype):
    x, tensors = problem(operation, size, dtype)
    packed = Depthwise().pack(operation, tensors)
    assert variants(operation, dtype)
    for variant in variants(operation, dtype):
        torch.full(operation.out_shape(x.shape), float("nan"), dtype=dtype, device=GPU)  # the result reuses this memory
        got = Depthwise().run([x], packed, operation, variant)
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert error(got, [x], tensors, operation) < TOLERANCE[dtype], variant


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_scale_and_residual(kernel, scaled):
    operation = conv(32, kernel, 2, activation="relu", scaled=scaled)
    x, tensors = problem(operation, (3, 15, 14), torch.float16)
    residual = torch.randn_like(Depthwise().run([x], Depthwise().pack(operation, tensors), operation, "1x4"))
    for variant in variants(operation, torch.float16):
        got = Depthwise().run([x, residual], Depthwise().pack(operation, tensors), operation, variant)
        assert error(got, [x, residual], tensors, operation) < TOLERANCE[torch.float16], variant


def test_inputs_at_any_address_and_empty_batches():
    operation = conv(24, 3)
    x, tensors = problem(operation, (3, 6, 7), torch.float16)
    packed = Depthwise().pack(operation, tensors)
    shifted = torch.empty(x.numel() + 1, device=GPU, dtype=x.dtype)[1:].view(3, 6, 7, 24).permute(0, 3, 1, 2).copy_(x)
    assert shifted.data_ptr() % 16
    for variant in variants(operation, torch.float16):
        expected = Depthwise().run([x], packed, operation, variant)
        assert torch.equal(Depthwise().run([shifted], packed, operation, variant), expected)
        assert torch.equal(Depthwise().run([x.contiguous()], packed, operation, variant), expected)
        assert Depthwise().run([x[:0]], packed, operation, variant).shape == (0, 24, 6, 7)


def test_images_smaller_than_the_kernel_raise():
    operation = conv(24, 7, padding=0)
    x, tensors = problem(operation, (1, 6, 9), torch.float16)
    with pytest.raises(EngineError, match="6 x 9 pixels are smaller than the kernel"):
        Depthwise().run([x], Depthwise().pack(operation, tensors), operation, "1x4")


def test_repeated_and_recorded_it_is_bitwise_the_same():
    operation = conv(96, 7)
    x, tensors = problem(operation, (32, 56, 56), torch.float16)
    packed = Depthwise().pack(operation, tensors)
    for variant in variants(operation, torch.float16):

        def twice(variant=variant):
            return Depthwise().run([Depthwise().run([x], packed, operation, variant)], packed, operation, variant)

        expected = twice()
        graph, out = record(twice, GPU)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)
