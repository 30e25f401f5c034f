"""The end of a residual block and the convolution that reads it in one kernel, against float64."""

import pytest
import torch
import torch.nn.functional as F

from halve.cuda_graphs import record
from halve.engine.kernels.wgmma_sp.chained import Chained
from halve.engine.operations import ChainedConvolution

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or Chained().unavailable(GPU, torch.float16) is not None,
        reason="needs a GPU with compute capability 9.0",
    ),
]
TILE = "256x64 own"
CHAINS = {
    "next block": ChainedConvolution(256, 64, "relu", 64, "relu"),
    "next stage": ChainedConvolution(256, 64, "relu", 128, "relu"),
    "shortcut": ChainedConvolution(256, 64, "relu", 64, "relu", shortcut_channels=64),
    "other channels": ChainedConvolution(256, 40, "none", 64, "silu", shortcut_channels=24),
}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def problem(chain, size, dtype):
    generator = torch.Generator("cuda").manual_seed(0)

    def values(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator, device=GPU) * scale

    images, height, width = size
    inputs = [
        values(images, channels, height, width).to(dtype).contiguous(memory_format=torch.channels_last)
        for channels in (chain.channels, chain.shortcut_channels or chain.rows)
    ]
    tensors = {
        "weight": values(chain.rows, chain.channels, 1, 1, scale=chain.channels**-0.5).to(dtype),
        "next_weight": values(chain.next_rows, chain.rows, 1, 1, scale=chain.rows**-0.5).to(dtype),
        "bias": values(chain.rows),
        "next_bias": values(chain.next_rows),
    }
    if chain.shortcut is not None:
        tensors["shortcut_weight"] = values(chain.rows, chain.shortcut_channels, 1, 1, scale=0.1).to(dtype)
    return inputs, tensors


def worst(got, expected, sizes):
    return float(((got.double() - expected).abs() / sizes).nan_to_num(1e9).max())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [(5, 56, 56), (1, 7, 9), (3, 5, 13), (40, 28, 28)], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_results(name, size, dtype):
    chain = CHAINS[name]
    inputs, tensors = problem(chain, size, dtype)
    assert Chained().fits(inputs, chain, TILE)
    torch.full(chain.out_shape(inputs[0].shape), float("nan"), dtype=dtype, device=GPU)  # the result reuses this memory
    y, z = chain.split(Chained().run(inputs, Chained().pack(chain, tensors), chain, TILE), inputs[0].shape)
    wide = {key: tensor.double() for key, tensor in tensors.items()}
    x, second = (value.double() for value in inputs)
    expected, _ = chain.split(chain.reference([x, second], wide), x.shape)
    sizes = F.conv2d(x.abs(), wide["weight"].abs(), wide["bias"].abs())
    if chain.shortcut is not None:
        sizes += F.conv2d(second.abs(), wide["shortcut_weight"].abs())
    else:
        sizes += second.abs()
    assert worst(y, expected, sizes) < TOLERANCE[dtype]
    following = {"weight": wide["next_weight"], "bias": wide["next_bias"]}
    expected = chain.following.reference([y.double()], following)
    sizes = F.conv2d(y.double().abs(), wide["next_weight"].abs(), wide["next_bias"].abs())
    assert worst(z, expected, sizes) < TOLERANCE[dtype]


def test_repeated_and_recorded_it_is_bitwise_the_same():
    chain = CHAINS["next stage"]
    inputs, tensors = problem(chain, (64, 56, 56), torch.float16)
    packed = Chained().pack(chain, tensors)
    expected = Chained().run(inputs, packed, chain, TILE)
    assert all(torch.equal(Chained().run(inputs, packed, chain, TILE), expected) for _ in range(5))
    graph, out = record(lambda: Chained().run(inputs, packed, chain, TILE), GPU)
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
