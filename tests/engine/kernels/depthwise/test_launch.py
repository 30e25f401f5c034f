import itertools

import pytest
import torch

from halve.engine.kernels.cuda import jit
from halve.engine.kernels.depthwise import launch
from halve.engine.operations import ACTIVATIONS, Convolution
from halve.errors import EngineError

CONV = Convolution(24, 1, (3, 3), padding=(1, 1), groups=24)


@pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_the_kernels_compile(architecture, tmp_path, monkeypatch):
    """One tile for each kernel size and stride; dtypes, activations, scale and residual take turns."""
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    kinds = zip(launch.TILES.items(), itertools.cycle(launch.DTYPES), itertools.cycle(ACTIVATIONS), strict=False)
    for ((kernel, stride), tiles), dtype, activation in kinds:
        scaled, residual = stride == 1, kernel == 5
        conv = Convolution(16, 1, (kernel, kernel), (stride, stride), groups=16, activation=activation, scaled=scaled)
        variant = launch.Variant(conv, dtype, residual, next(reversed(tiles)))
        assert b"depthwise" in launch.machine_code(variant, architecture)


@pytest.mark.parametrize(
    "variant",
    [
        launch.Variant(CONV, torch.float32, False, "2x4"),
        launch.Variant(CONV, torch.float16, False, "3x3"),
        launch.Variant(Convolution(17, 1, (3, 3), groups=17), torch.float16, False, "2x4"),
        launch.Variant(Convolution(24, 24, (3, 3)), torch.float16, False, "2x4"),
        launch.Variant(Convolution(24, 1, (3, 3), groups=24, activation="tanh"), torch.float16, False, "2x4"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(variant):
    with pytest.raises(EngineError, match=r"got torch.float32|unknown tile|does not support|unknown activation"):
        variant.options()


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
@pytest.mark.parametrize("channels", [8, 16, 72, 96, 120, 672, 768, 1152])
def test_lanes_cover_all_channels_without_idle_blocks(channels, vector):
    groups, lanes = launch.split_lanes(channels // vector, vector)
    assert groups * lanes >= channels // vector > (groups - 1) * lanes
    assert lanes <= 128


@pytest.mark.parametrize("height", [1, 7, 14, 57])
def test_strips_are_short_where_few_threads_run_and_long_where_many_do(height):
    few, many = (launch.strip_rows(height, blocks, 264, 7) for blocks in (1, 26400))
    assert 1 <= few <= many == height
