import itertools

import pytest
import torch

from halve.engine.cuda import jit
from halve.engine.cuda.conv import DTYPES, Variant, machine_code
from halve.engine.ops import ACTIVATIONS
from halve.errors import EngineError

pytestmark = pytest.mark.skipif(jit.available() is not None, reason=str(jit.available()))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_every_variant_compiles(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    variants = [Variant(*chosen) for chosen in itertools.product((False, True), DTYPES, (64,), ("none", "relu"))]
    variants += [Variant(True, torch.float16, channels, name) for channels in (64, 12) for name in ACTIVATIONS]
    for variant in variants:
        assert b"conv" in machine_code(variant, architecture)
    assert len(list(tmp_path.iterdir())) == len(set(map(tuple, (v.options() for v in variants))))


def test_the_activations_are_numbered_as_the_kernel_counts_them():
    assert list(ACTIVATIONS) == ["none", "relu", "gelu", "silu", "hardswish"]


@pytest.mark.parametrize("variant", [Variant(True, torch.float32, 64, "none"), Variant(True, torch.float16, 6, "none")])
def test_what_the_kernel_cannot_do_is_refused(variant):
    with pytest.raises(EngineError, match=r"not torch.float32|multiple of 4"):
        variant.options()
