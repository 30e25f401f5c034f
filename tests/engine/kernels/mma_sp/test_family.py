import pytest
import torch

from halve.engine.kernels.cuda import driver, wgmma
from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.mma_sp.family import MmaDense, MmaSparse
from halve.engine.kernels.mma_sp.launch import TILES
from halve.engine.operations import Convolution, Linear, MaxPool
from halve.errors import EngineError
from tests.random_masks import random

GPU = torch.device("cuda")
CONV = Convolution(16, 64, (3, 3), padding=(1, 1))


def halved(*shape):
    weight = random(*shape, seed=1)
    weight[:, ::2] = 0
    return weight


def variants(family, operation, dtype=torch.float16, is_2_4=True):
    return tuple(family().variants(Piece(operation, dtype, is_2_4), GPU))


def test_supported_layers():
    assert variants(MmaSparse, CONV) == variants(MmaDense, CONV) == tuple(TILES)
    assert variants(MmaSparse, Linear(8, 4)) == tuple(TILES)
    assert variants(MmaSparse, CONV, is_2_4=False) == ()
    assert variants(MmaDense, CONV, is_2_4=False) == tuple(TILES)
    for family in (MmaSparse, MmaDense):
        assert variants(family, CONV, dtype=torch.float32) == ()
        assert variants(family, Convolution(8, 2, groups=2)) == ()
        assert variants(family, Convolution(8, 6)) == ()
        assert variants(family, MaxPool((2, 2), (2, 2), (0, 0), (1, 1), False)) == ()


def test_only_mma_sp_is_sparse():
    assert MmaSparse.sparse
    assert not MmaDense.sparse
    assert not MmaSparse.library
    weight = halved(16, 64, 3, 3).half()
    sparse, dense = (family().pack(CONV, {"weight": weight}) for family in (MmaSparse, MmaDense))
    assert sparse["values"].numel() * 2 == dense["values"].numel()
    assert "metadata" not in dense


def test_results_are_channels_last():
    tensors = {"weight": halved(16, 64, 3, 3), "bias": random(16)}
    for family in (MmaSparse(), MmaDense()):
        got = family.run([random(2, 64, 5, 6)], family.pack(CONV, tensors), CONV, "64x64")
        assert got.is_contiguous(memory_format=torch.channels_last)


def refused(match, x=None, residual=None, conv=CONV, **changed):
    x = random(1, 64, 4, 4) if x is None else x
    packed = MmaSparse().pack(CONV, {"weight": halved(16, 64, 3, 3), "bias": random(16)})
    packed |= {name: change(packed[name]) for name, change in changed.items()}
    with pytest.raises(EngineError, match=match):
        MmaSparse().run([x] if residual is None else [x, residual], packed, conv, "64x64")


def test_arguments_that_a_kernel_would_misread_raise():
    refused(r"shape \(N, 64, H, W\), got \(64, 4, 4\)", x=random(64, 4, 4))
    refused(r"shape \(N, 64, H, W\), got \(1, 32, 4, 4\)", x=random(1, 32, 4, 4))
    refused("convert the input", x=random(1, 64, 4, 4).double())
    refused("residual must have the shape of the result", residual=random(1, 16, 4, 5))
    refused("contiguous float32 tensor of 16 values", bias=lambda b: b.double())
    refused("contiguous float32 tensor of 16 values", bias=lambda b: b[:8])
    refused("int32", metadata=lambda m: m.long())


def test_arguments_that_a_kernel_would_read_out_of_bounds_raise():
    refused(r"values .* with shape \(1, 18, 32, 8\)", values=lambda v: v[:, :2])
    refused("must be contiguous", values=lambda v: v.to(memory_format=torch.channels_last))
    refused(r"metadata .* with shape", metadata=lambda m: m[:, :2])
    refused("contiguous float32 tensor of 16", bias=lambda b: torch.zeros(32)[::2])


def test_an_empty_batch_of_rows_returns_an_empty_result():
    linear = Linear(16, 64)
    packed = MmaSparse().pack(linear, {"weight": halved(16, 64)})
    assert MmaSparse().run([torch.zeros(0, 64)], packed, linear, "64x64").shape == (0, 16)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(wgmma, "unavailable", lambda device, dtype: None)
    monkeypatch.setattr(driver, "processors", lambda index: 132)


@pytest.mark.parametrize("family", [MmaSparse(), MmaDense()])
@pytest.mark.parametrize(
    ("operation", "shape", "kept"),
    [
        (Convolution(64, 64, (3, 3), padding=(1, 1)), (8, 64, 56, 56), {"64x64"}),
        (Linear(384, 96), (8, 3, 3, 384), {"64x64", "64x32k4", "32x32k8", "16x32k8"}),
        (Convolution(64, 64, (3, 3), padding=(1, 1)), (32, 64, 56, 56), set()),
        (Convolution(64, 64, (3, 3), padding=(1, 1)), (1, 64, 512, 512), set(TILES)),  # too wide for wgmma
        (Convolution(64, 64, (3, 3), stride=(3, 3)), (32, 64, 56, 56), set(TILES)),  # not a stride of wgmma
    ],
)
def test_on_hopper_tiles_are_left_out_only_where_its_own_kernels_run(hopper, family, operation, shape, kept):
    x = torch.empty(shape, dtype=torch.float16, device="meta")
    assert set(family.promising([x], operation, list(TILES))) == kept
