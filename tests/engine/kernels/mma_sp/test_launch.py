import itertools

import pytest
import torch

from halve.engine.kernels.cuda import jit
from halve.engine.kernels.mma_sp.launch import DTYPES, TILES, Variant, machine_code
from halve.engine.operations import ACTIVATIONS
from halve.errors import EngineError

pytestmark = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))


def compiles(architecture, kinds):
    activations = itertools.cycle(ACTIVATIONS)
    for sparse, dtype, channels, tile in kinds:
        assert b"conv" in machine_code(Variant(sparse, dtype, channels, next(activations), tile), architecture)


def test_every_tile_compiles_in_every_type_with_all_and_with_half_of_the_weights():
    """Each tile also with whole (64) and cut (12) copies of channels for both; activations take turns."""
    kinds = itertools.product(TILES, DTYPES, (False, True))
    compiles("sm_90a", [(s, dtype, 64 if s == (dtype is DTYPES[0]) else 12, tile) for tile, dtype, s in kinds])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_120"])
def test_other_architectures_compile_what_depends_on_them(architecture):
    """Each type, with all and with half of the weights, with whole and cut copies, on a small and the largest tile."""
    first, second, *_, last = TILES
    compiles(
        architecture,
        [
            (True, DTYPES[0], 64, first),
            (True, DTYPES[1], 12, last),
            (False, DTYPES[0], 12, last),
            (False, DTYPES[1], 64, second),
        ],
    )


def test_tiles_fit_into_the_shared_memory_of_small_gpus():
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
def test_what_the_kernel_cannot_do_is_refused(variant):
    with pytest.raises(EngineError, match=r"got torch.float32|divisible by 4, got 6|unknown tile|unknown activation"):
        variant.options()
