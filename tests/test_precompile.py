"""benchmarks/precompile.py finds the kernels that planning would time on a GPU."""

import pytest
import torch

from benchmarks.precompile import GPU, captured, jobs_of, pretended_gpu
from halve.engine.kernels.cuda import driver, jit, wgmma
from halve.engine.kernels.registry import FAMILIES


@pytest.fixture(scope="module")
def body():
    return captured("resnet18", 64)


def families(jobs):
    return {job.func.__module__.split(".")[-2] for job in jobs.values()}


def test_hopper_gets_its_own_kernels_and_other_gpus_do_not(body):
    with pretended_gpu((9, 0), 132):
        hopper = jobs_of(body, 1, 64)
    with pretended_gpu((8, 0), 108):
        ampere = jobs_of(body, 1, 64)
    assert families(hopper) == {"wgmma_sp", "mma_sp"}
    assert families(ampere) == {"mma_sp"}
    variants = [job.args[0] for job in hopper.values()]
    assert any(getattr(variant, "shortcut", False) for variant in variants)  # joined layers
    assert len(jobs_of_many(body)) > len(hopper)  # other batch sizes need other tiles


def jobs_of_many(body):
    with pretended_gpu((9, 0), 132):
        return jobs_of(body, 1, 64) | jobs_of(body, 64, 64)


def test_nothing_is_pretended_afterwards():
    before = torch.cuda.get_device_capability, driver.processors, wgmma.unavailable
    with pretended_gpu((9, 0), 132):
        assert FAMILIES["wgmma_sp"].unavailable(GPU, torch.float16) is None
    assert (torch.cuda.get_device_capability, driver.processors, wgmma.unavailable) == before


@pytest.mark.skipif(jit.unavailable() is not None, reason="needs NVRTC")
def test_kernels_are_compiled_into_the_cache(body, monkeypatch, tmp_path):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    with pretended_gpu((8, 0), 108):
        job = next(iter(jobs_of(body, 1, 64).values()))
        job()
    assert len([*tmp_path.glob("*.cubin")]) == 1
