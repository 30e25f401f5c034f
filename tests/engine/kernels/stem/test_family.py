import pytest
import torch
from torch import nn

from halve.engine.fuse import fuse
from halve.engine.kernels.cuda import jit
from halve.engine.kernels.dense.family import Dense
from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.stem import launch
from halve.engine.kernels.stem.family import Stem
from halve.engine.layer import Layer
from halve.engine.operations import Convolution, MaxPool, PooledConvolution
from halve.graph import capture
from tests.random_masks import random

STEM = PooledConvolution(64, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
TENSORS = {"weight": random(64, 3, 7, 7, seed=1), "bias": random(64, seed=2)}


class Net(nn.Module):
    def __init__(self, channels=3, pool=None):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = pool or nn.MaxPool2d(3, 2, 1)
        self.norm.running_mean.copy_(random(64, seed=3))

    def forward(self, x):
        return self.pool(self.norm(self.conv(x)).relu())


def layers(net, x):
    module = fuse(capture(net.eval(), x).parts[0])
    with torch.no_grad():
        assert torch.allclose(module(x), net(x), atol=1e-4)
    return [layer.operation for layer in module.modules() if isinstance(layer, Layer)]


def test_a_first_layer_and_its_pooling_are_one_operation():
    assert layers(Net(), random(2, 3, 32, 32)) == [STEM]


@pytest.mark.parametrize("net", [Net(channels=8), Net(pool=nn.MaxPool2d(3, 2, 1, ceil_mode=True))])
def test_other_layers_and_their_pooling_stay_apart(net):
    found = layers(net, random(2, net.conv.in_channels, 32, 32))
    assert [type(operation) for operation in found] == [Convolution, MaxPool]


def test_supported_layers():
    def variants(operation, dtype=torch.float16):
        return tuple(Stem().variants(Piece(operation, dtype), torch.device("cuda")))

    assert variants(STEM) == ("pooled",)
    assert variants(STEM, torch.float32) == ()
    assert variants(STEM.convolution) == ()
    assert variants(PooledConvolution(32, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))) == ()


def test_sizes_that_fit():
    assert all(launch.fits(torch.empty(shape, device="meta")) for shape in ((1, 3, 224, 224), (9, 3, 33, 32)))
    assert not any(
        launch.fits(torch.empty(shape, device="meta")) for shape in ((1, 3, 8, 100), (1, 3, 8, 512), (0, 3, 8, 32))
    )


@pytest.mark.parametrize("family", [Stem(), Dense()])
def test_without_a_gpu_the_reference_runs(family):
    x = random(2, 3, 32, 64)
    packed = family.pack(STEM, TENSORS)
    assert all(torch.equal(family.unpack(STEM, packed)[name], tensor) for name, tensor in TENSORS.items())
    got = family.run([x], packed, STEM, family.variants(Piece(STEM, torch.float16), torch.device("cpu"))[0])
    assert torch.allclose(got, STEM.reference([x], TENSORS), atol=1e-5)


@pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
@pytest.mark.parametrize(("pixels", "planar"), [(16, False), (112, True), (128, False)])
def test_the_kernel_compiles(pixels, planar, tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    assert b"stem" in launch.machine_code(torch.bfloat16, pixels, planar, "sm_90a")
    assert launch.shared_bytes(pixels) <= 227 * 1024
