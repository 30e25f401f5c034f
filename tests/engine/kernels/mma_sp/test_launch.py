import itertools

import pytest
import torch

from halve.engine.kernels.cuda import jit
from halve.engine.kernels.mma_sp.launch import DTYPES, TILES, Variant, machine_code
from halve.engine.operations import ACTIVATIONS
from halve.errors import EngineError

pytestmark = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_every_tile_compiles_in_every_dtype_with_alternating_activations(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    kinds = itertools.product((False, True), DTYPES, (64, 12), TILES)
    activations = itertools.cycle(ACTIVATIONS)
    variants = [Variant(sparse, dtype, channels, next(activations), tile) for sparse, dtype, channels, tile in kinds]
    for variant in variants:
        assert b"conv" in machine_code(variant, architecture)


def test_tiles_fit_in_the_shared_memory_of_small_gpus():
    assert max(tile.shared_bytes for tile in TILES.values()) <= 99 * 1024


@pytest.mark.parametrize(
    "variant",
    [
        Variant(True, torch.float32, 64, "none", "64x64"),
        Variant(True, torch.float16, 6, "none", "64x64"),
        Variant(True, torch.float16, 8, "none", "1x1"),
        Variant(True, torch.float16, 8, "tanh", "64x64"),
    ],
)
def test_unsupported_variants_raise(variant):
    with pytest.raises(EngineError, match=r"got torch.float32|divisible by 4|unknown tile|unknown activation"):
        variant.options()
