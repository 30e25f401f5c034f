"""The kernels against float64, on a GPU: every layer of five networks, and odd shapes."""

import itertools
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torchvision

from halve.engine.kernels.cuda import driver
from halve.engine.kernels.mma_sp import launch as conv
from halve.engine.kernels.mma_sp.family import MmaDense, MmaSparse
from halve.engine.kernels.mma_sp.launch import TILES
from halve.engine.kernels.mma_sp.packing import pack
from halve.engine.operations import ACTIVATIONS, Convolution, Linear
from halve.errors import EngineError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or driver.unavailable(torch.device("cuda")) is not None,
        reason="needs a GPU with compute capability 8.0 or newer",
    ),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
NETWORKS = ("resnet18", "resnet34", "resnet50", "convnext_tiny", "convnext_small")


def two_of_four(rows, channels, kernel, generator):
    """A random weight, 2:4 along channels, and its mask."""
    shape = (rows, *kernel, -(-channels // 4), 4)
    weight = torch.randn(shape, generator=generator, device="cuda")
    order = torch.rand(shape, generator=generator, device="cuda").argsort(-1)
    weight = (weight * (order < 2)).flatten(3)[..., :channels].permute(0, 3, 1, 2)
    return weight / (channels * kernel[0] * kernel[1]) ** 0.5


def problem(geometry, images, height, width, dtype, *, bias, residual, seed=0):
    """Fresh random data."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = two_of_four(geometry.rows, geometry.channels, geometry.kernel, generator).to(dtype)
    x = torch.randn(images, geometry.channels, height, width, generator=generator, device="cuda").to(dtype)
    out = (images, geometry.rows, *geometry.out_size(height, width))
    b = torch.randn(geometry.rows, generator=generator, device="cuda") if bias else None
    r = torch.randn(out, generator=generator, device="cuda").to(dtype) if residual else None
    x, r = (t if t is None else t.contiguous(memory_format=torch.channels_last) for t in (x, r))
    return x, weight, b, r  # in the kernel's layout: a copy would take the memory that was filled with NaN


def poison(x, geometry):
    """Fill freed memory with NaN, which the next result will reuse."""
    out = (x.shape[0], geometry.rows, *geometry.out_size(*x.shape[-2:]))
    torch.full(out, float("nan"), dtype=x.dtype, device="cuda")


def run(x, weight, b, r, geometry, tile, *, sparse):
    family = MmaSparse() if sparse else MmaDense()
    packed = family.pack(geometry, {"weight": weight} if b is None else {"weight": weight, "bias": b})
    inputs = [family.reads.of(tensor) if tensor.dim() == 4 else tensor for tensor in (x, r) if tensor is not None]
    poison(x, geometry)
    return family.run(inputs, packed, geometry, tile)


def difference(y, x, weight, b, r, geometry):
    """The largest |y - reference| over conv(|x|, |w|) + |b| + |r|."""
    inputs = [tensor.double() for tensor in (x, r) if tensor is not None]
    tensors = {name: tensor.double() for name, tensor in (("weight", weight), ("bias", b)) if tensor is not None}
    reference = geometry.reference(inputs, tensors)
    sizes = [tensor.abs() for tensor in inputs], {name: tensor.abs() for name, tensor in tensors.items()}
    scale = replace(geometry, activation="none").reference(*sizes)
    assert y.shape == reference.shape
    error = (y.double() - reference).abs()
    assert not error.isnan().any()
    return float((error / scale.clamp(min=1e-6)).max())


def layers_of(network):
    """(geometry, height, width) of every layer that can be sparse, each once."""
    model, found = getattr(torchvision.models, network)().eval(), {}

    def note(module, args, _):
        if isinstance(module, torch.nn.Linear):
            rows = args[0].reshape(-1, args[0].shape[-1])
            found[Convolution(module.out_features, module.in_features), len(rows), 1] = None
        elif module.groups == 1 and module.in_channels % 4 == 0:
            sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
            found[Convolution(module.out_channels, module.in_channels, *sizes), *args[0].shape[2:]] = None

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    return list(found)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_layer_of_a_network(network):
    wrong = []
    for number, (geometry, height, width) in enumerate(layers_of(network)):
        for tile, dtype, sparse in itertools.product(TILES, TOLERANCE, (True, False)):
            data = problem(geometry, 2, height, width, dtype, bias=True, residual=number % 2 == 0, seed=number)
            worst = difference(run(*data, geometry, tile, sparse=sparse), *data, geometry)
            if worst > TOLERANCE[dtype]:
                wrong.append(f"{geometry} at {height} x {width}, {tile}, {dtype}, sparse {sparse}: {worst:.2e}")
    assert not wrong, "\n".join(wrong)


ODD = [
    (rows, channels, kernel, stride, padding, dilation, images, height, width)
    for rows, channels in ((4, 4), (17, 12), (64, 68), (130, 100), (7, 2048), (2048, 20))
    for kernel, stride, padding, dilation in (
        ((1, 1), (1, 1), (0, 0), (1, 1)),
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((3, 3), (2, 2), (1, 1), (1, 1)),
        ((2, 5), (3, 1), (1, 4), (1, 2)),
        ((7, 7), (2, 2), (3, 3), (1, 1)),
    )
    for images, height, width in ((1, 1, 1), (2, 7, 5), (3, 33, 33))
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_odd_shapes(activation):
    wrong, tried = [], 0
    for number, (rows, channels, kernel, *sizes, images, height, width) in enumerate(ODD):
        geometry = Convolution(rows, channels, kernel, *sizes, activation=activation)
        if min(geometry.out_size(height, width)) < 1:
            continue
        for tile, dtype in itertools.product(TILES, TOLERANCE):
            sparse, tried = (number + tried) % 3 > 0, tried + 1  # alternate, so that each tile runs in each dtype
            flags = {"bias": number % 2 == 0, "residual": number % 3 == 0}
            data = problem(geometry, images, height, width, dtype, **flags, seed=number)
            worst = difference(run(*data, geometry, tile, sparse=sparse), *data, geometry)
            if worst > TOLERANCE[dtype]:
                wrong.append(f"{geometry} at {images} x {height} x {width}, {tile}, {dtype}, {sparse}: {worst:.2e}")
    assert tried > 500
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("tile", TILES)
def test_repeated_runs_are_bit_identical(tile):
    geometry = Convolution(256, 256, (3, 3), padding=(1, 1), activation="relu")
    x, weight, b, r = problem(geometry, 4, 14, 14, torch.float16, bias=True, residual=True)
    first = run(x, weight, b, r, geometry, tile, sparse=True)
    for _ in range(10):
        assert torch.equal(run(x, weight, b, r, geometry, tile, sparse=True), first)


def test_inputs_in_other_layouts_give_the_same_result():
    geometry = Convolution(32, 16, (3, 3), padding=(1, 1))
    x, weight, b, r = problem(geometry, 2, 9, 9, torch.float16, bias=True, residual=True)
    first = run(x, weight, b, r, geometry, "64x64", sparse=True)
    assert torch.equal(run(x.contiguous(), weight, b, r.contiguous(), geometry, "64x64", sparse=True), first)
    wide = torch.cat([x, x], 3)[..., :9]
    assert torch.equal(run(wide, weight, b, r, geometry, "64x64", sparse=True), first)


def test_nan_propagates_through_the_convolution_and_relu():
    geometry = Convolution(32, 16, (3, 3), padding=(1, 1), activation="relu")
    x, weight, b, r = problem(geometry, 1, 9, 9, torch.float16, bias=True, residual=True)
    x[0, :, 4, 4] = float("nan")
    expected = geometry.reference([x, r], {"weight": weight, "bias": b}).isnan()
    assert torch.equal(run(x, weight, b, r, geometry, "64x64", sparse=True).isnan(), expected)


def test_wrong_arguments_raise():
    geometry = Convolution(32, 16, (1, 1))
    x, weight, b, _ = problem(geometry, 1, 4, 4, torch.float16, bias=True, residual=False)
    for bad in (x[:, :8], x[0][None, None], x.float(), x.cpu()):
        with pytest.raises(EngineError, match=r"must have shape|convert|move"):
            run(bad, weight, b, None, geometry, "64x64", sparse=True)
    with pytest.raises(EngineError, match=r"float32"):
        run(x, weight, b.half(), None, geometry, "64x64", sparse=True)
    with pytest.raises(EngineError, match=r"residual must have the shape"):
        run(x, weight, b, x, geometry, "64x64", sparse=True)
    with pytest.raises(EngineError, match=r"unknown tile"):
        run(x, weight, b, None, geometry, "1x1", sparse=True)


def test_an_empty_batch_returns_an_empty_result():
    geometry = Convolution(32, 16, (3, 3))
    x, weight, b, r = problem(geometry, 0, 9, 9, torch.float16, bias=True, residual=True)
    assert run(x, weight, b, r, geometry, "64x64", sparse=True).shape == (0, 32, 7, 7)


def test_more_pixels_than_the_kernel_can_count_run_the_reference(monkeypatch):
    geometry = Convolution(32, 16, (3, 3), padding=(1, 1))
    data = problem(geometry, 2, 9, 9, torch.float16, bias=True, residual=True)
    monkeypatch.setattr(MmaSparse, "max_pixels", 2 * 9 * 9 - 1)
    monkeypatch.setattr(MmaSparse, "launch", None)  # would raise if called
    assert difference(run(*data, geometry, "64x64", sparse=True), *data, geometry) < TOLERANCE[torch.float16]


@pytest.mark.filterwarnings("ignore")
def test_opcheck_passes_on_a_gpu():
    geometry = Convolution(32, 16, (3, 3), padding=(1, 1), activation="relu")
    x, weight, b, r = problem(geometry, 2, 9, 9, torch.float16, bias=True, residual=True)
    packed = MmaSparse().pack(geometry, {"weight": weight, "bias": b})
    arguments = ([x, r], list(packed.values()), " ".join(packed), geometry.to_json(), "mma_sp", "64x64")
    torch.library.opcheck(torch.ops.halve.run_kernel.default, arguments)


def test_the_kernel_runs_on_the_current_stream_and_in_a_graph():
    geometry = Convolution(64, 64, (3, 3), padding=(1, 1))
    x, weight, b, r = problem(geometry, 2, 14, 14, torch.float16, bias=True, residual=True)
    expected = run(x, weight, b, r, geometry, "64x64", sparse=True)
    packed = pack(weight, weight != 0)
    graph = torch.cuda.CUDAGraph()
    still, last = torch.zeros_like(x), r.contiguous(memory_format=torch.channels_last)
    with torch.cuda.graph(graph):
        y = conv.run(conv.Operands(still, packed.values, packed.metadata, b, last), geometry, "64x64")
    still.copy_(x)
    graph.replay()
    assert torch.equal(y, expected)


def test_a_new_thread_may_launch_it_first():
    geometry, results = Convolution(64, 64), []
    data = problem(geometry, 1, 8, 8, torch.float16, bias=True, residual=False)
    packed = pack(data[1], data[1] != 0)

    def work():
        operands = conv.Operands(data[0], packed.values, packed.metadata, data[2], None)
        results.append(conv.run(operands, geometry, "64x64"))

    work()
    thread = threading.Thread(target=work)  # where PyTorch has not initialized a context
    thread.start()
    thread.join()
    assert torch.equal(*results)


def test_a_slice_that_is_not_aligned_to_sixteen_bytes_is_supported():
    _, weight, b, _ = problem(Convolution(32, 16), 1, 1, 1, torch.float16, bias=True, residual=False)
    x = torch.randn(1, 28, device="cuda").half()[:, 12:]
    assert x.data_ptr() % 16 == 8
    matrix, linear = weight.flatten(1), Linear(32, 16)
    added = torch.randn(1, 36, device="cuda").half()[:, 4:]
    packed = MmaSparse().pack(linear, {"weight": matrix, "bias": b})
    got = MmaSparse().run([x, added], packed, linear, "64x64")
    expected = F.linear(x.double(), matrix.double(), b.double()) + added
    assert (got - expected).abs().max() <= 2e-3 * expected.abs().max()
