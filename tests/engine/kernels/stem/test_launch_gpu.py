"""The kernel for first layers against float64, on a Hopper GPU."""

import pytest
import torch
import torch.nn.functional as F

from halve.cuda_graphs import record
from halve.engine.kernels.stem.family import Stem
from halve.engine.operations import PooledConvolution

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or Stem().unavailable(GPU, torch.float16) is not None,
        reason="needs a GPU with compute capability 9.0",
    ),
]
STEM = PooledConvolution(64, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


def problem(size, dtype=torch.float16):
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(64, 3, 7, 7, generator=generator, device=GPU) / 12
    tensors = {"weight": weight.to(dtype), "bias": torch.randn(64, generator=generator, device=GPU)}
    x = torch.randn(size[0], 3, *size[1:], generator=generator, device=GPU).to(dtype)
    return x.contiguous(memory_format=torch.channels_last), tensors


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "size", [(1, 224, 224), (3, 64, 96), (2, 33, 32), (7, 2, 256), (40, 224, 224), (700, 32, 32)], ids=str
)
def test_results(size, dtype):
    x, tensors = problem(size, dtype)
    packed = Stem().pack(STEM, tensors)
    torch.full(STEM.out_shape(x.shape), float("nan"), dtype=dtype, device=GPU)  # the result will reuse this memory
    got = Stem().run([x], packed, STEM, "pooled")
    torch.full(STEM.out_shape(x.shape), float("nan"), dtype=dtype, device=GPU)
    assert torch.equal(Stem().run([x.contiguous()], packed, STEM, "pooled"), got)
    got = got.double()
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    sizes = F.conv2d(x.double().abs(), exact["weight"].abs(), exact["bias"].abs(), 2, 3)
    error = (got - STEM.reference([x.double()], exact)).abs() / F.max_pool2d(sizes, 3, 2, 1)
    assert float(error.nan_to_num(1e9).max()) < TOLERANCE[dtype]


def test_repeated_and_recorded_it_is_bitwise_the_same():
    x, tensors = problem((64, 224, 224))
    packed = Stem().pack(STEM, tensors)
    expected = Stem().run([x], packed, STEM, "pooled")
    assert all(torch.equal(Stem().run([x], packed, STEM, "pooled"), expected) for _ in range(5))
    graph, out = record(lambda: Stem().run([x], packed, STEM, "pooled"), GPU)
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_nan_in_an_image_reaches_the_results_that_see_it():
    x, tensors = problem((2, 64, 64))
    x[1, 0, 32, 32] = float("nan")
    got = Stem().run([x], Stem().pack(STEM, tensors), STEM, "pooled")
    expected = STEM.reference([x], {**tensors, "bias": tensors["bias"].half()})
    assert not bool(got[0].isnan().any())
    assert bool(got.isnan()[expected.isnan()].all())


def test_images_of_other_sizes_run_the_reference():
    x, tensors = problem((1, 100, 100))
    got = Stem().run([x], Stem().pack(STEM, tensors), STEM, "pooled")
    assert torch.allclose(got, STEM.reference([x], tensors), atol=1e-2)
