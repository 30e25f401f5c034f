import copy
import json
from collections import namedtuple

import pytest
import torch
from torch import nn

import halve
from halve.engine import saved
from halve.engine.kernels.registry import FALLBACK
from halve.errors import EngineError, EngineWarning, FileError
from tests.engine.nets import SPARSE, Net, compiled, same, sparsely
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
    fast.save(tmp_path / "net.pt2")
    again = halve.load_compiled(tmp_path / "net.pt2")
    again.save(tmp_path / "twice.pt2")
    for network in (fast, again, halve.load_compiled(tmp_path / "twice.pt2")):
        assert network(images(3)).shape == (3, 4, 8, 8)
        with pytest.raises(EngineError, match=r"x\.size\(\)\[2\] <= 10"):
            network(torch.randn(2, 4, 12, 12))


@pytest.mark.parametrize("kernels", [{1: SPARSE}, {1: FALLBACK, 1000: SPARSE}])
def test_biases_are_loaded_to_the_bit(tmp_path, kernels):
    fast = compiled(convnet(), dtype=torch.bfloat16)
    for layer in fast.layers:
        layer.use(kernels if layer.is_2_4 else {1: FALLBACK})
    fast.save(tmp_path / "net.pt2")
    again = halve.load_compiled(tmp_path / "net.pt2")
    assert [layer.kernels for layer in again.layers] == [layer.kernels for layer in fast.layers]
    for mine, theirs in zip(fast.layers, again.layers, strict=True):
        for name, tensor in mine.tensors().items():
            assert torch.equal(theirs.tensors()[name], tensor)
            assert theirs.tensors()[name].dtype == tensor.dtype
    for count in (1, 50):
        assert torch.equal(again(images(count)), fast(images(count)))


def test_without_the_device_it_was_saved_from_it_runs_dense_and_says_so(tmp_path, monkeypatch):
    fast = sparsely(compiled(convnet()))
    fast.plan.dense = None  # as on a GPU
    with monkeypatch.context() as patch:
        patch.setattr(saved, "json", _SayingCuda)
        fast.save(tmp_path / "net.pt2")
    with pytest.warns(EngineWarning, match="running dense"):
        again = halve.load_compiled(tmp_path / "net.pt2")
    assert {kernel for layer in again.layers for kernel in layer.kernels.values()} == {FALLBACK}
    torch.testing.assert_close(again(images(2)), fast(images(2)))


class _SayingCuda:
    @staticmethod
    def dumps(about):
        return json.dumps({**about, "device": "cuda"})


ONE_PIXEL_IS_LEFT = {  # of these images at the end, which torch.export would solve for where sizes are free, and cannot
    "fixed": nn.Sequential(
        nn.Conv2d(4, 8, 11, 4, 2), *(nn.MaxPool2d(3, 2) for _ in range(2)), nn.AdaptiveAvgPool2d(6), nn.Flatten()
    ),
    "free": nn.Sequential(nn.Conv2d(4, 8, 3, 4, 1), nn.AvgPool2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
}


@pytest.mark.parametrize("name", ONE_PIXEL_IS_LEFT)
def test_sizes_that_cannot_be_proven_free_are_saved_as_they_are(tmp_path, name):
    fast = compiled(ONE_PIXEL_IS_LEFT[name].eval(), example=torch.randn(2, 4, 32, 32), any_size=True)
    fast.save(tmp_path / "net.pt2")
    again = halve.load_compiled(tmp_path / "net.pt2")
    x = torch.randn(3, 4, 32, 32)
    assert torch.equal(again(x), fast(x))
    with pytest.raises(EngineError, match="with an example of that shape"):
        again(torch.randn(3, 4, 40, 40))


@pytest.fixture(scope="module")
def of_any_size():
    model = family("resnet_basic")
    return model, compiled(model, example=torch.randn(2, 3, 64, 64), any_size=True)


@pytest.mark.parametrize("packed", [False, True])
def test_saved_and_loaded_it_is_the_same(tmp_path, of_any_size, packed):
    model, fast = of_any_size
    fast = sparsely(copy.deepcopy(fast)) if packed else fast
    path = tmp_path / "net.pt2"
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
    path = tmp_path / "net.pt2"
    path.write_bytes(b"not a network")
    with pytest.raises(FileError, match="not a compiled network"):
        halve.load_compiled(path)
    compiled(convnet()).save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(FileError, match="not a compiled network"):
        halve.load_compiled(path)
    with pytest.raises(FileError, match="not a compiled network"):
        halve.load_compiled(tmp_path / "missing.pt2")


def test_a_damaged_file_is_refused(tmp_path):
    fast = compiled(convnet())
    fast.save(tmp_path / "net.pt2")
    content = bytearray((tmp_path / "net.pt2").read_bytes())
    weight = next(layer.tensors()["weight"] for layer in fast.layers).contiguous().numpy().tobytes()
    content[bytes(content).index(weight) + 5] ^= 64
    (tmp_path / "net.pt2").write_bytes(content)
    with pytest.raises(FileError, match="is damaged"):
        halve.load_compiled(tmp_path / "net.pt2")


Pair = namedtuple("Pair", ["a", "b"])


def test_what_the_format_does_not_take_is_not_saved(tmp_path):
    fast = same(Net(lambda n, x: Pair(n.a(x), n.b(x))), images(2))
    with pytest.raises(EngineError, match="cannot be saved"):
        fast.save(tmp_path / "net.pt2")


@pytest.mark.parametrize(("version", "advice"), [(3, "compile the model again"), (99, "upgrade halve")])
def test_another_version_of_the_format_says_what_to_do(tmp_path, monkeypatch, version, advice):
    with monkeypatch.context() as patch:
        patch.setattr(saved, "VERSION", version)
        compiled(convnet()).save(tmp_path / "net.pt2")
    with pytest.raises(FileError, match=f"format version {version}.*{advice}"):
        halve.load_compiled(tmp_path / "net.pt2")
