import pytest
import torch

from halve.engine.kernels.wgmma_sp.joined import JoinedDense, JoinedSparse
from halve.engine.operations import JoinedConvolution
from halve.errors import EngineError
from tests.random_masks import random

END = JoinedConvolution(16, 8, (3, 3), (1, 1), (1, 1), "relu", shortcut_channels=24, shortcut_stride=(2, 2))


def tensors():
    found = {"weight": random(16, 8, 3, 3, seed=1).half(), "shortcut_weight": random(16, 24, 1, 1, seed=2).half()}
    for weight in found.values():
        weight[:, ::4], weight[:, 1::4] = 0, 0
    return {**found, "bias": random(16, seed=3)}


@pytest.fixture(params=[JoinedSparse(), JoinedDense()], ids=["sparse", "dense"])
def family(request):
    return request.param


def test_without_a_gpu_the_reference_runs(family):
    packed, inputs = family.pack(END, tensors()), [random(2, 8, 5, 6).half(), random(2, 24, 9, 11).half()]
    y = family.run(inputs, packed, END, "128x64")
    expected = END.reference([x.float() for x in inputs], {name: t.float() for name, t in tensors().items()})
    torch.testing.assert_close(y.float(), expected, atol=2e-2, rtol=1e-2)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8, 5, 6), (2, 20, 9, 11)), "must have 8 and 24 channels"),
        (((2, 8, 5, 6), (2, 24, 12, 11)), "do not fit together"),
        (((2, 8, 5, 6), (3, 24, 9, 11)), "do not fit together"),
    ],
)
def test_wrong_inputs_are_refused(family, shapes, message):
    with pytest.raises(EngineError, match=message):
        family.run([random(*shape).half() for shape in shapes], family.pack(END, tensors()), END, "128x64")


def test_wrong_tensors_are_refused(family):
    inputs, packed = [random(2, 8, 5, 6).half(), random(2, 24, 9, 11).half()], family.pack(END, tensors())
    with pytest.raises(EngineError, match="blocks must be contiguous"):
        family.run(inputs, {**packed, "blocks": packed["blocks"][:, :-1]}, END, "128x64")
    with pytest.raises(EngineError, match="one dtype"):
        family.run([inputs[0], inputs[1].float()], packed, END, "128x64")
    with pytest.raises(EngineError, match="bias must be 16"):
        family.run(inputs, {**packed, "bias": packed["bias"][:-1]}, END, "128x64")
