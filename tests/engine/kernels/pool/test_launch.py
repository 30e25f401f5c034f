import pytest
import torch

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.pool import launch as pool
from halve.errors import EngineError

pytestmark = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_compiles(architecture, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    for kernel in ((3, 3), (13, 13)):
        assert pool.machine_code(dtype, kernel, architecture).startswith(b"\x7fELF")


def test_images_on_a_cpu_fall_back_to_pytorch():
    x = torch.zeros(1, 8, 4, 4, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    assert not pool.fits(x, [3, 3])


def test_without_a_compiler_there_is_no_kernel(monkeypatch):
    def refuse(*arguments):
        raise EngineError("no compiler")

    monkeypatch.setattr(driver, "unavailable", lambda device: None)
    monkeypatch.setattr(driver, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(jit, "cubin", refuse)
    pool._kernel.cache_clear()
    assert pool._kernel(torch.float16, (3, 3), 0) is None
    pool._kernel.cache_clear()
