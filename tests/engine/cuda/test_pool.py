import pytest
import torch

from halve.engine.cuda import jit, pool

pytestmark = pytest.mark.skipif(jit.available() is not None, reason=str(jit.available()))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_compiles(architecture, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    for kernel in ((3, 3), (13, 13)):
        assert pool.machine_code(dtype, kernel, architecture).startswith(b"\x7fELF")


def test_images_that_are_not_on_a_gpu_are_left_to_pytorch():
    assert not pool.fits(torch.zeros(1, 8, 4, 4, dtype=torch.float16).contiguous(memory_format=torch.channels_last))
