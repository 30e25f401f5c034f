import pytest
import torch

from halve.engine.kernels.cuda import driver
from halve.engine.kernels.kernel import Piece
from halve.engine.kernels.wgmma_sp import launch
from halve.engine.kernels.wgmma_sp.family import WgmmaDense, WgmmaSparse
from halve.engine.kernels.wgmma_sp.tiling import TILES, Shortcut
from halve.engine.operations import Convolution, Linear, MaxPool
from halve.errors import EngineError
from halve.outputs import relative_error
from tests.random_masks import random

GPU = torch.device("cuda")
CONV = Convolution(16, 64, (3, 3), padding=(1, 1), activation="relu")


def halved(*shape):
    weight = random(*shape, seed=1)
    weight[:, ::2] = 0
    return weight.half()


def variants(family, operation, dtype=torch.float16, is_2_4=True):
    return tuple(family().variants(Piece(operation, dtype, is_2_4), GPU))


def test_supported_layers():
    assert variants(WgmmaSparse, CONV) == variants(WgmmaDense, CONV) == tuple(TILES)
    assert variants(WgmmaSparse, Linear(8, 8)) == tuple(TILES)
    assert variants(WgmmaSparse, CONV, is_2_4=False) == ()
    assert variants(WgmmaDense, CONV, is_2_4=False) == tuple(TILES)
    for family in (WgmmaSparse, WgmmaDense):
        assert variants(family, CONV, dtype=torch.float32) == ()
        assert variants(family, Convolution(8, 8, groups=2)) == ()
        assert variants(family, Convolution(8, 12)) == ()
        assert variants(family, MaxPool((2, 2), (2, 2), (0, 0), (1, 1), False)) == ()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_than_hopper_are_a_reason(capability, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert "capability 9.0, not that of another GPU" in WgmmaSparse().unavailable(GPU, torch.float16)
    assert "got torch.float32" in WgmmaSparse().unavailable(GPU, torch.float32)


@pytest.mark.parametrize("family", [WgmmaSparse(), WgmmaDense()])
def test_without_a_gpu_the_reference_runs(family):
    x, residual, bias = random(2, 64, 5, 6).half(), random(2, 16, 5, 6, seed=3).half(), random(16)
    weight = halved(16, 64, 3, 3)
    packed = family.pack(CONV, {"weight": weight, "bias": bias})
    got = family.run([x, residual], packed, CONV, "128x256")
    expected = CONV.reference([x, residual], {"weight": weight, "bias": bias})
    assert relative_error(got, expected) < 2e-3
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_a_scale_applies_to_weight_and_bias_but_not_to_the_residual():
    linear = Linear(16, 64, scaled=True)
    x, residual, tensors = random(5, 64).half(), random(5, 16).half(), {"weight": halved(16, 64), "bias": random(16)}
    packed = WgmmaSparse().pack(linear, {**tensors, "scale": random(16, seed=4)})
    expected = random(16, seed=4) * (x.float() @ tensors["weight"].float().T + tensors["bias"]) + residual
    got = WgmmaSparse().run([x, residual], packed, linear, "128x64")
    assert relative_error(got, expected) < 2e-3
    assert torch.equal(WgmmaSparse().unpack(linear, packed)["scale"], random(16, seed=4))
    with pytest.raises(EngineError, match="the layer is scaled, but has no scale"):
        WgmmaSparse().run([x], {name: packed[name] for name in ("blocks", "bias")}, linear, "128x64")


def test_linear_layers_take_rows_of_any_shape():
    linear = Linear(16, 64)
    weight = halved(16, 64)
    packed = WgmmaSparse().pack(linear, {"weight": weight})
    assert torch.equal(WgmmaSparse().unpack(linear, packed)["weight"], weight)
    x = random(2, 3, 5, 64).half()
    assert relative_error(WgmmaSparse().run([x], packed, linear, "128x64"), x @ weight.T) < 2e-3
    assert WgmmaSparse().run([x[:0]], packed, linear, "128x64").shape == (0, 3, 5, 16)


def test_arguments_that_the_kernel_would_misread_raise():
    packed = WgmmaSparse().pack(CONV, {"weight": halved(16, 64, 3, 3), "bias": random(16)})

    def refused(match, x=None, **changed):
        with pytest.raises(EngineError, match=match):
            WgmmaSparse().run([random(1, 64, 4, 4).half() if x is None else x], {**packed, **changed}, CONV, "128x256")

    refused(r"shape \(N, 64, H, W\), got \(1, 32, 4, 4\)", x=random(1, 32, 4, 4))
    refused("convert the input", x=random(1, 64, 4, 4).double())
    refused(r"blocks .* with shape \(1, 1, 9, 2304\)", blocks=packed["blocks"][:, :, :3])
    refused("contiguous float32 tensor of 16 values", bias=packed["bias"][:8])


def test_weights_of_other_widths_are_refused():
    with pytest.raises(EngineError, match=r"float16 or bfloat16, got a weight in torch.float32"):
        WgmmaSparse().pack(CONV, {"weight": halved(16, 64, 3, 3).float()})


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(driver, "processors", lambda device: 132)


def photos(*shape):
    return torch.empty(shape, dtype=torch.float16, device="meta")


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    ("rows", "channels", "kernel", "size", "shortcut"),
    [
        (512, 512, 3, 7, None),
        (256, 256, 3, 14, None),
        (512, 2048, 1, 7, None),
        (512, 512, 3, 7, Shortcut(256, 2)),
    ],
)
def test_batches_that_do_not_fit_into_the_planned_tile_run_in_another(
    h200, sparse, rows, channels, kernel, size, shortcut
):
    conv = Convolution(rows, channels, (kernel, kernel), padding=(kernel // 2,) * 2)
    few, many = photos(2, channels, size, size), photos(512, channels, size, size)
    options = {"sparse": sparse, "shortcut": shortcut}
    planned = launch.usable(few, conv, "128x128k4", **options)
    assert str(planned.tile) == "128x128k4"
    assert launch.fitting(many, conv, "128x128k4", **options) is None
    used = launch.usable(many, conv, "128x128k4", **options)
    assert str(used.tile) in launch.worth_timing(many, conv, list(TILES), **options)
    assert used == launch.fitting(many, conv, str(used.tile), **options)


def test_images_that_fit_into_no_tile_have_no_tiling(h200):
    x = photos(1, 64, 3, 300)
    assert launch.usable(x, Convolution(64, 64, (3, 3), padding=(1, 1)), "128x256", sparse=True) is None
