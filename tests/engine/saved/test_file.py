"""Compiled networks are the same after saving and loading."""

import copy
from collections import namedtuple
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import halve
from halve.engine.kernels.registry import FALLBACK
from halve.engine.plan import Entry
from halve.engine.saved import file
from halve.errors import EngineError, EngineWarning, FileError
from tests.engine.nets import SPARSE, Net, compiled, sparsely
from tests.engine.saved.edited import edited
from tests.families import family
from tests.tiny import convnet, images


class Larger(nn.Module):
    """Treats large images otherwise."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x) * 2 if x.shape[2] > 10 else self.conv(x)


def test_a_loaded_network_refuses_what_the_saved_one_refuses(tmp_path):
    fast = compiled(Larger().eval(), halve.MaskSet({}), any_size=True)
    fast.save(tmp_path / "net")
    again = halve.load_compiled(tmp_path / "net")
    again.save(tmp_path / "twice")
    for network in (fast, again, halve.load_compiled(tmp_path / "twice")):
        assert network(images(3)).shape == (3, 4, 8, 8)
        with pytest.raises(EngineError, match=r"x\.size\(\)\[2\] <= 10"):
            network(torch.randn(2, 4, 12, 12))


@pytest.mark.parametrize("kernels", [{1: SPARSE}, {1: FALLBACK, 1000: SPARSE}])
def test_biases_are_loaded_to_the_bit(tmp_path, kernels):
    fast = compiled(convnet(), dtype=torch.bfloat16)
    for layer in fast.layers:
        layer.use(kernels if layer.is_2_4 else {1: FALLBACK})
    fast.save(tmp_path / "net")
    again = halve.load_compiled(tmp_path / "net")
    assert [layer.kernels for layer in again.layers] == [layer.kernels for layer in fast.layers]
    for mine, theirs in zip(fast.layers, again.layers, strict=True):
        for name, tensor in mine.tensors().items():
            assert torch.equal(theirs.tensors()[name], tensor)
            assert theirs.tensors()[name].dtype == tensor.dtype
    for count in (1, 50):
        assert torch.equal(again(images(count)), fast(images(count)))


def test_without_the_device_it_was_saved_from_it_runs_dense_and_says_so(tmp_path):
    fast = sparsely(compiled(convnet()))
    fast.plan.dense = None  # as on a GPU
    fast.save(tmp_path / "net")
    path = edited(tmp_path / "net", lambda header, tensors: header.update(device="cuda"))
    with pytest.warns(EngineWarning, match="running dense"):
        again = halve.load_compiled(path, device="cpu")
    assert {kernel for layer in again.layers for kernel in layer.kernels.values()} == {FALLBACK}
    torch.testing.assert_close(again(images(2)), fast(images(2)))


def test_the_plan_is_saved_and_nothing_is_run_for_it(tmp_path):
    fast = compiled(convnet())
    entry = Entry("0", "4>8 3x3 at 2 x 8 x 8", "dense torch", False, 0.25, 0.25, None, None, "fastest")
    fast.plan.batches = {2: [entry], 10**9: [entry]}  # whose images would not fit into memory
    fast.plan.uncompiled["3\x1b[2J"] = "not compiled:\tnever"
    fast.save(tmp_path / "net")
    plan = halve.load_compiled(tmp_path / "net").plan
    assert plan.batches == fast.plan.batches
    assert plan.dense == fast.plan.dense
    assert plan.uncompiled == {"3\\x1b[2J": "not compiled:\\tnever"}  # nothing that could control a terminal


def test_a_large_example_takes_no_memory(tmp_path):
    fast = compiled(nn.Conv2d(4, 4, 1, stride=64).eval(), halve.MaskSet({}), torch.zeros(1, 4, 512, 512))
    fast.save(tmp_path / "net")
    again = halve.load_compiled(tmp_path / "net")
    assert again.example[0].shape == (1, 4, 512, 512)
    assert again.example[0].untyped_storage().nbytes() == 4
    x = torch.randn(2, 4, 512, 512)
    assert torch.equal(again.warmup(3)(x), fast(x))


ONE_PIXEL_IS_LEFT = {  # of these images at the end
    "fixed": nn.Sequential(
        nn.Conv2d(4, 8, 11, 4, 2), *(nn.MaxPool2d(3, 2) for _ in range(2)), nn.AdaptiveAvgPool2d(6), nn.Flatten()
    ),
    "free": nn.Sequential(nn.Conv2d(4, 8, 3, 4, 1), nn.AvgPool2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
}


@pytest.mark.parametrize("name", ONE_PIXEL_IS_LEFT)
def test_a_loaded_network_takes_the_sizes_that_the_saved_one_takes(tmp_path, name):
    fast = compiled(ONE_PIXEL_IS_LEFT[name].eval(), example=torch.randn(2, 4, 32, 32), any_size=True)
    fast.save(tmp_path / "net")
    again = halve.load_compiled(tmp_path / "net")
    assert again.guards == fast.guards
    for size in (32, 40):
        x = torch.randn(3, 4, size, size)
        if fast.guards.broken((x,)) is None:
            assert torch.equal(again(x), fast(x))
        else:
            with pytest.raises(EngineError, match="with an example of that shape"):
                again(x)


@pytest.fixture(scope="module")
def of_any_size():
    model = family("resnet_basic")
    return model, compiled(model, example=torch.randn(2, 3, 64, 64), any_size=True)


@pytest.mark.parametrize("packed", [False, True])
def test_saved_and_loaded_it_is_the_same(tmp_path, of_any_size, packed):
    model, fast = of_any_size
    fast = sparsely(copy.deepcopy(fast)) if packed else fast
    path = tmp_path / "net"
    fast.save(path)
    again = halve.load_compiled(path)
    x = torch.randn(3, 3, 64, 96)
    assert torch.equal(again(x), fast(x))
    assert [(a.name, a.kernels) for a in again.layers] == [(a.name, a.kernels) for a in fast.layers]
    assert again.reason == fast.reason
    with pytest.raises(EngineError, match=r"is torch\.float16"):
        again(x.half())
    if packed:
        assert path.stat().st_size < 0.7 * sum(p.numel() * 4 for p in model.parameters())


def test_files_that_are_something_else_are_refused(tmp_path):
    path = tmp_path / "net"
    path.write_bytes(b"not a network")
    with pytest.raises(FileError, match="not a safetensors file"):
        halve.load_compiled(path)
    with pytest.raises(FileError, match="not a compiled network; choose another path"):
        compiled(convnet()).save(path)
    compiled(convnet()).save(path, force=True)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(FileError, match="damaged"):
        halve.load_compiled(path)
    with pytest.raises(FileError, match="no such file"):
        halve.load_compiled(tmp_path / "missing")
    halve.prune(convnet()).save(path, force=True)
    with pytest.raises(FileError, match="not a compiled network; 'halve compile'"):
        halve.load_compiled(path)


Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Found:
    a: torch.Tensor


torch.export.register_dataclass(Found)


@pytest.mark.parametrize("outputs", [lambda y: Pair(y, y), lambda y: Found(y)], ids=["namedtuple", "dataclass"])
def test_outputs_of_other_classes_are_not_saved(tmp_path, outputs):
    fast = compiled(Net(lambda n, x: outputs(n.a(x))).eval(), halve.MaskSet({}))
    with pytest.raises(
        EngineError, match=r"cannot be saved: output: it returns a (Pair|Found); only tensors in tuples"
    ):
        fast.save(tmp_path / "net")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("version", "advice"), [(0, "make it again with 'halve compile'"), (99, "upgrade halve")])
def test_another_version_of_the_format_says_what_to_do(tmp_path, monkeypatch, version, advice):
    with monkeypatch.context() as patch:
        patch.setattr(file, "FORMAT", replace(file.FORMAT, version=version))
        compiled(convnet()).save(tmp_path / "net")
    with pytest.raises(FileError, match=f"format version {version}.*{advice}"):
        halve.load_compiled(tmp_path / "net")
