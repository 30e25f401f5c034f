"""benchmarks/bench_photos.py on a CPU, with a small network and few pictures."""

import pytest
import torch
from torch import nn

import halve
from benchmarks import bench_photos
from tests.pictures import encoded


@pytest.fixture
def model():
    """A network whose first BatchNorm has a variance that float16 cannot hold."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval()
    net[0].weight.data *= 300
    net[1].running_var.fill_(300**2)
    net[4].running_var.uniform_(0.01, 0.1)
    return net


def test_photos_of_all_sizes_are_read_at_one(tmp_path):
    for number, size in enumerate([(176, 176), (224, 224), (300, 200)]):
        (tmp_path / "cat").mkdir(exist_ok=True)
        (tmp_path / "cat" / f"{number}.png").write_bytes(encoded(number, size))
    assert [batch.shape for batch in bench_photos.photos(tmp_path, 0, "cpu")] == [(3, 3, 224, 224)]


def test_folding_keeps_the_outputs_and_leaves_no_norm(model):
    images = torch.randn(2, 3, 16, 16)
    plain = bench_photos.folded(model, images)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    torch.testing.assert_close(plain(images), model(images))
    assert isinstance(model[1], nn.BatchNorm2d)


@pytest.mark.filterwarnings("ignore::halve.errors.EngineWarning")  # float16 runs dense on a CPU
def test_only_unfolded_norms_overflow(model):
    batches = list(torch.randn(2, 20, 3, 16, 16))
    records = list(bench_photos.compare(model, halve.prune(model), batches))
    systems = ["torch", "torch, BatchNorm folded", "halve", "halve, all sparse"]
    assert [r["system"] for r in records] == 2 * systems
    assert {r["photos"] for r in records} == {40}
    flips = {(r["dtype"], r["system"]): r["flips"] for r in records}
    assert flips["float16", "torch"] > 20
    assert all(flips["float16", system] <= 2 for system in systems[1:])
    assert all(flips["bfloat16", system] <= 10 for system in systems)
