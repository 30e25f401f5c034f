"""How much is computed at a time: bounds do not depend on it, and small GPUs are not overfilled."""

import pytest
import torch

from benchmarks.soundness import image, network
from halve.certify import memory, operators
from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds
from halve.certify.network import network_of
from halve.certify.operators import Convolution
from halve.certify.rounding import Interval

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@pytest.fixture
def free(monkeypatch):
    """A GPU with so many free bytes."""

    def there_are(size, reserved=0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size, 10 * size))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        memory._fitting.cache_clear()
        return torch.device("cuda")

    yield there_are
    memory._fitting.cache_clear()


@pytest.mark.parametrize("gigabytes", [2, 8, 24, 140])
def test_what_is_kept_on_a_gpu_fits(free, gigabytes):
    device = free(gigabytes << 30)
    numbers = [2 * memory.windows(device) + 8 * memory.coefficients(device), 4 * memory.kept(device)]
    assert max(numbers) * 8 <= gigabytes << 30
    assert memory.windows(device) < 2**31


def test_what_pytorch_holds_already_is_free_to_use(free):
    alone = memory.coefficients(free(1 << 30))
    assert memory.coefficients(free(1 << 29, reserved=1 << 29)) == alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [3, 9, 12])
def test_convolutions_as_products_in_portions(monkeypatch, seed, device):
    """As on a GPU for large images: unfolded, a few rows at a time."""
    model, x = network(seed), image(seed)[None]
    label, changes = int(model(x).argmax()), {}
    captured = network_of(model, x)
    for name, layers in captured.layers.items():
        changes[name] = WeightBox(1e-3 * layers[0].weight.abs())
    direct = Bounds(captured, Interval(x, x + 0.01), changes)
    monkeypatch.setattr(Convolution, "_as_product", lambda self, x: self._groups == 1)
    monkeypatch.setattr(operators, "windows", lambda device: 5000)
    monkeypatch.setattr(operators, "_SMALL", {"cpu": 0, "cuda": 0})
    x, changes = x.to(device), {name: WeightBox(change.radii.to(device)) for name, change in changes.items()}
    portions = Bounds(network_of(model.to(device), x), Interval(x, x + 0.01), changes)
    assert portions.margins([label]) == pytest.approx(direct.margins([label]), abs=1e-10)
    for one, other in zip(portions.values, direct.values, strict=True):
        assert torch.allclose(one.low.cpu(), other.low, atol=1e-10)
