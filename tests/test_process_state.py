"""No public call changes the process that it runs in: random numbers, environment variables, numbers of threads."""

import contextlib
import dataclasses
import os
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve.engine.compile import NETWORK
from halve.errors import DataError, HalveError
from halve.process_state import preserved_process_state
from tests.tiny import convnet, images, labels
from tests.untouched import untouched


class Careless(nn.Module):
    """A network whose forward changes whatever a process has."""

    def __init__(self):
        super().__init__()
        self.net = convnet()

    def forward(self, x):
        change_the_process()
        return self.net(x)


def change_the_process():
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(1)
    os.environ["HALVE_TEST_NEW"] = "1"
    os.environ.pop("HALVE_TEST_OLD", None)
    torch.set_num_threads(torch.get_num_threads() + 1)


def shuffled():
    """A loader that takes its order from the global random numbers."""
    return DataLoader(TensorDataset(images(24), labels(24)), 8, shuffle=True)


def compiled(model, masks, path):
    fast = halve.compile(model, masks, images(2))
    if NETWORK not in fast.plan.uncompiled:
        fast.save(path)
        halve.load_compiled(path)


def exported(model, masks, path):
    with contextlib.suppress(HalveError):  # what changes the process may not export, but is not to change it either
        halve.export(model, masks, images(2), path)
        halve.check_onnx(path)
        halve.certify(halve.load_onnx(path), None, images(4), reference=model)


def planned(model, path):
    plan = halve.measure(model, images(2), seconds=0.001)
    plan.save(path)
    faster = {name: dataclasses.replace(layer, dense_ms=2.0, sparse_ms=1.0) for name, layer in plan.items()}
    plan = dataclasses.replace(halve.load_plan(path), layers=faster)
    halve.frontier(model, shuffled(), plan, points=2, steps=2, validation=images(8), fallback=False)


CALLS = {
    "select": lambda model, masks, path: halve.select(model),
    "prune": lambda model, masks, path: halve.prune(model),
    "prune, permuted": lambda model, masks, path: halve.prune(model, permute=True, example=images(2)),
    "prune, random": lambda model, masks, path: halve.prune(model, "random"),
    "prune, wanda": lambda model, masks, path: halve.prune(model, "wanda", shuffled(), recalibrate=True),
    "prune, reconstruct": lambda model, masks, path: halve.prune(model, "reconstruct", shuffled()),
    "learn": lambda model, masks, path: halve.learn(model, shuffled(), steps=2, validation=False),
    "recalibrate": lambda model, masks, path: halve.recalibrate(model, masks, shuffled()),
    "apply": lambda model, masks, path: halve.apply(model, masks),
    "restore_order": lambda model, masks, path: halve.restore_order(model, masks),
    "verify": lambda model, masks, path: halve.verify(model, masks),
    "evaluate": lambda model, masks, path: halve.evaluate(model, masks, shuffled()),
    "certify": lambda model, masks, path: halve.certify(model, masks, shuffled()),
    "report": lambda model, masks, path: halve.report(masks, model=model, data=shuffled()),
    "export": lambda model, masks, path: exported(model, masks, path / "net.onnx"),
    "measure": lambda model, masks, path: planned(model, path / "plan.json"),
    "pack": lambda model, masks, path: halve.unpack(halve.pack(model, masks, path / "net.packed.safetensors")),
    "save": lambda model, masks, path: halve.load(masks.save(path / "net.masks.safetensors")),
    "compile": lambda model, masks, path: compiled(model, masks, path / "net.pt2"),
    "bench": lambda model, masks, path: halve.bench(
        model, masks, images(2), batch_sizes=[2], dtype=torch.float32, systems=["eager", "halve"], seconds=0.001
    ),
}


@pytest.mark.filterwarnings("ignore::halve.errors.EngineWarning")
@pytest.mark.filterwarnings("ignore::halve.errors.SpeedWarning")  # what masks save is noise in networks this small
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("net", [convnet, Careless])
def test_no_public_call_changes_the_process(call, net, tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_TEST_OLD", "1")
    model = net().eval()
    masks = halve.prune(model)
    with untouched(model):
        call(model, masks, tmp_path)


def test_every_public_function_is_called_here():
    called = {name.split(",")[0] for name in CALLS} | {"load", "load_compiled", "load_plan", "unpack"}
    called |= {"check_onnx", "load_onnx", "frontier"}
    functions = {name for name in halve.__all__ if callable(getattr(halve, name)) and name.islower()}
    assert functions <= called


@pytest.mark.parametrize("error", [None, DataError])
def test_the_process_is_restored_also_after_an_error(error):
    with untouched(nn.Identity()):
        try:
            with preserved_process_state():
                change_the_process()
                if error is not None:
                    raise error("bad data")
        except DataError:
            assert error is DataError


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_random_numbers_of_a_gpu_are_restored():
    torch.cuda.init()
    with untouched(nn.Identity()), preserved_process_state():
        torch.rand(1, device="cuda")
