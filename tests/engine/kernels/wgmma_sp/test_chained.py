import pytest
import torch

from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.wgmma_sp.chained import Chained
from halve.engine.operations import ChainedConvolution, Operation
from halve.errors import EngineError
from tests.random_masks import random

ADDED = ChainedConvolution(256, 64, "relu", 128, "relu")
SHORTCUT = ChainedConvolution(256, 64, "relu", 64, "none", shortcut_channels=72)


def problem(chain):
    tensors = {
        "weight": random(chain.rows, chain.channels, 1, 1, seed=1) / 8,
        "next_weight": random(chain.next_rows, chain.rows, 1, 1, seed=2) / 16,
        "bias": random(chain.rows, seed=3),
        "next_bias": random(chain.next_rows, seed=4),
    }
    if chain.shortcut is not None:
        tensors["shortcut_weight"] = random(chain.rows, chain.shortcut_channels, 1, 1, seed=5) / 8
    dtypes = {name: torch.float16 if name.endswith("weight") else torch.float32 for name in tensors}
    inputs = [random(2, chain.channels, 3, 5, seed=6), random(2, chain.shortcut_channels or chain.rows, 3, 5, seed=7)]
    return [x.half() for x in inputs], {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()}


@pytest.mark.parametrize("chain", [ADDED, SHORTCUT])
def test_packing_is_lossless_and_without_a_gpu_the_reference_runs(chain):
    inputs, tensors = problem(chain)
    packed = Chained().pack(chain, tensors)
    back = Chained().unpack(chain, packed)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    y, z = chain.split(Chained().run(inputs, packed, chain, "256x64 own"), inputs[0].shape)
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    expected = chain.split(chain.reference([x.float() for x in inputs], wide), inputs[0].shape)
    torch.testing.assert_close(y.float(), expected[0], atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(z.float(), expected[1], atol=2e-2, rtol=1e-2)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert Operation.from_json(chain.to_json()) == chain


def test_variants():
    def variants(operation, dtype=torch.float16):
        return list(Chained().variants(Piece(operation, dtype), torch.device("cuda")))

    assert variants(ADDED) == variants(SHORTCUT) == ["256x64 own"]
    assert variants(ADDED, torch.float32) == []
    assert variants(ADDED.convolution) == []
    assert variants(ChainedConvolution(512, 128, "relu", 128, "relu")) == []
    assert variants(ChainedConvolution(256, 64, "relu", 72, "relu")) == []


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 64, 3, 5), (2, 64, 3, 5)), "must have 64 and 256 channels"),
        (((2, 64, 3, 5), (2, 256, 5, 3)), "do not fit together"),
        (((2, 64, 3, 5), (1, 256, 3, 5)), "do not fit together"),
    ],
)
def test_wrong_inputs_are_refused(shapes, message):
    packed = Chained().pack(ADDED, problem(ADDED)[1])
    with pytest.raises(EngineError, match=message):
        Chained().run([random(*shape).half() for shape in shapes], packed, ADDED, "256x64 own")


def test_wrong_tensors_are_refused():
    inputs, tensors = problem(ADDED)
    packed = Chained().pack(ADDED, tensors)
    for name in ("blocks", "next_blocks", "bias", "next_bias"):
        with pytest.raises(EngineError, match=f"^{name} must be"):
            Chained().run(inputs, {**packed, name: packed[name][:-1]}, ADDED, "256x64 own")
    with pytest.raises(EngineError, match="one dtype"):
        Chained().run([inputs[0], inputs[1].float()], packed, ADDED, "256x64 own")
