import pytest
import torch
from torch import nn

from halve.engine.fuse import fuse
from halve.engine.kernels.depthwise.family import Depthwise
from halve.engine.kernels.depthwise.launch import TILES
from halve.engine.kernels.kernel import Kernel, Piece
from halve.engine.layer import Layer
from halve.engine.layer_times import LayerTimes
from halve.engine.operations import Convolution, Linear, MaxPool
from halve.errors import EngineError
from halve.graph import capture
from tests.random_masks import random

GPU = torch.device("cuda")
CONV = Convolution(24, 1, (5, 5), (2, 2), (2, 2), groups=24, activation="hardswish")
TENSORS = {"weight": random(24, 1, 5, 5, seed=1), "bias": random(24, seed=2)}


def depthwise(channels=24, kernel=3, stride=1, **others):
    return Convolution(channels, 1, (kernel, kernel), (stride, stride), (1, 1), groups=channels, **others)


def variants(operation, dtype=torch.float16):
    return tuple(Depthwise().variants(Piece(operation, dtype), GPU))


def test_supported_layers():
    for kernel, stride in TILES:
        assert variants(depthwise(96, kernel, stride)) == tuple(TILES[kernel, stride])
        assert all(variant.startswith("1x") for variant in variants(depthwise(17, kernel, stride)))
        assert variants(depthwise(17, kernel, stride))
    assert variants(depthwise(), torch.float32) == ()
    assert variants(depthwise(kernel=4)) == ()
    assert variants(depthwise(stride=3)) == ()
    assert variants(depthwise(dilation=(2, 2))) == ()
    assert variants(Convolution(24, 1, (3, 5), groups=24)) == ()
    assert variants(Convolution(48, 1, (3, 3), groups=24)) == ()  # two filters per channel
    assert variants(Convolution(24, 2, (3, 3), groups=12)) == ()
    assert variants(Convolution(24, 24, (3, 3))) == ()
    assert variants(Linear(24, 24)) == ()
    assert variants(MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False)) == ()


def test_it_is_one_of_our_kernels_and_dense():
    """So it may run in any plan, and never in the dense baseline."""
    assert not Depthwise.sparse
    assert not Depthwise.library
    layer = Layer("conv", CONV, TENSORS)
    ours, library = Kernel("depthwise", "2x4"), Kernel("dense", "torch")
    times = LayerTimes(layer, 1, "", {library: 2.0, ours: 1.0})
    assert (times.best_dense, times.best_our_dense, times.best_ours) == (library, ours, ours)
    assert times.ours_above(1.0) == ours
    assert not layer.is_2_4


def test_packing_is_lossless():
    packed = Depthwise().pack(CONV, TENSORS)
    assert packed["values"].shape == (5, 5, 24)
    assert packed["values"].is_contiguous()
    back = Depthwise().unpack(CONV, packed)
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("scaled", [False, True])
def test_without_a_gpu_the_reference_runs(scaled):
    conv = depthwise(kernel=7, activation="gelu", scaled=scaled)
    tensors = {"weight": random(24, 1, 7, 7, seed=1), "bias": random(24, seed=2)}
    tensors |= {"scale": random(24, seed=3)} if scaled else {}
    x = random(2, 24, 9, 8)
    residual = random(*conv.out_shape(x.shape), seed=4)
    got = Depthwise().run([x, residual], Depthwise().pack(conv, tensors), conv, "2x4")
    torch.testing.assert_close(got, conv.reference([x, residual], tensors))
    assert got.is_contiguous(memory_format=torch.channels_last)


def refused(match, x=None, residual=None, **changed):
    x = random(1, 24, 8, 8) if x is None else x
    packed = Depthwise().pack(CONV, TENSORS)
    packed |= {name: change(packed[name]) for name, change in changed.items()}
    with pytest.raises(EngineError, match=match):
        Depthwise().run([x] if residual is None else [x, residual], packed, CONV, "2x4")


def test_arguments_that_the_kernel_would_misread_raise():
    refused(r"shape \(N, 24, H, W\), got \(1, 1, 8, 8\)", x=random(1, 1, 8, 8))
    refused("convert the input", x=random(1, 24, 8, 8).double())
    refused("residual must have the shape of the result", residual=random(1, 24, 8, 8))
    refused("contiguous float32 tensor of 24 values", bias=lambda b: b.double())
    refused(r"values .* with shape \(5, 5, 24\)", values=lambda v: v[:3])
    refused("must be contiguous", values=lambda v: v.transpose(0, 1))


class Block(nn.Module):
    """As in MobileNet: expand, filter, project."""

    def __init__(self):
        super().__init__()
        self.expand, self.filter = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 24, 3, 2, 1, groups=24, bias=False)
        self.norm, self.project = nn.BatchNorm2d(24), nn.Conv2d(24, 8, 1)

    def forward(self, x):
        return self.project(nn.functional.hardswish(self.norm(self.filter(self.expand(x)))))


def test_depthwise_layers_are_fused_with_norm_and_activation():
    module = fuse(capture(Block().eval(), random(2, 8, 9, 9)).parts[0])
    operations = [layer.operation for layer in module.modules() if isinstance(layer, Layer)]
    assert operations[1] == depthwise(stride=2, activation="hardswish")
    assert [bool(variants(operation)) for operation in operations] == [False, True, False]


def test_the_operator_is_opaque_and_keeps_channels_last():
    layer = Layer("conv", CONV, TENSORS)
    layer.use({128: Kernel("depthwise", "2x4")})
    x = random(2, 24, 8, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = compiled(x)
    torch.testing.assert_close(got, CONV.reference([x], TENSORS))
    assert got.is_contiguous(memory_format=torch.channels_last)
