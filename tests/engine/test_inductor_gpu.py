"""Inductor between our kernels, and recordings next to those of torch.compile, on a GPU."""

import random
import time

import pytest
import torch
import torchvision
from torch import nn

import halve
from halve.cuda_graphs import record
from halve.engine.kernels.cuda import driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or driver.unavailable(torch.device("cuda")) is not None, reason="no fitting GPU"
    ),
]
SECONDS = 60


def convnext():
    torch.manual_seed(0)
    features = torchvision.models.convnext_tiny(weights=None).features[:2]
    for name, parameter in features.named_parameters():
        if "layer_scale" in name:
            nn.init.normal_(parameter)
    return features.eval()


def test_convnext_blocks_are_compiled_by_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    model, x = convnext(), torch.randn(64, 3, 64, 64, device="cuda").half()
    masks = halve.prune(model)
    fast = halve.compile(model, masks, x)
    expected = halve.apply(model, masks).cuda()(x.float())
    assert float((fast(x) - expected).norm() / expected.norm()) < 5e-3
    assert 64 in fast.plan.inductor, str(fast.plan)
    fast.save(tmp_path / "net")
    again = halve.load_compiled(tmp_path / "net")
    assert 64 in again.plan.inductor
    assert float((again(x) - fast(x)).norm() / expected.norm()) < 1e-3


def few_layers():
    """A network with few kernels to compile and time: recordings are what matters."""
    convolutions = [nn.Conv2d(3, 64, 3, 2, 1), nn.Conv2d(64, 64, 3, 1, 1), nn.Conv2d(64, 128, 3, 2, 1)]
    layers = [module for one in convolutions for module in (one, nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).eval()


@pytest.mark.long
def test_recordings_live_next_to_those_of_torch_compile(monkeypatch):
    """Recorded networks, torch.compile with CUDA graphs, new recordings and freed memory in turns, for a minute."""
    monkeypatch.setattr("halve.engine.compiled.by_default", lambda device: False)
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model = few_layers()
    masks = halve.prune(model)
    fast = halve.compile(model, masks, torch.randn(8, 3, 64, 64, device="cuda").half(), batch_sizes=[1, 32])
    dense = torchvision.models.resnet18(num_classes=10).eval().cuda().half()
    theirs = torch.compile(dense, mode="reduce-overhead", dynamic=False)
    batches = {size: torch.randn(size, 3, 64, 64, device="cuda").half() for size in (1, 5, 8, 32)}

    def call_theirs(x):
        torch.compiler.cudagraph_mark_step_begin()
        return theirs(x).clone()

    with torch.no_grad():
        for _ in range(3):
            call_theirs(batches[8])
        expected = {("halve", size): fast(x) for size, x in batches.items()}
        expected["theirs", 8] = call_theirs(batches[8])
        kept, chance, turns = [], random.Random(0), 0
        began = time.monotonic()
        while time.monotonic() - began < SECONDS:
            turns += 1
            action = chance.choice(["halve", "halve", "theirs", "theirs", "free", "record", "allocate", "workspaces"])
            if action == "halve":
                size = chance.choice([*batches])
                assert torch.equal(fast(batches[size]), expected["halve", size]), f"turn {turns}"
            elif action == "theirs":
                assert torch.equal(call_theirs(batches[8]), expected["theirs", 8]), f"turn {turns}"
            elif action == "free":
                kept.clear()
                torch.cuda.empty_cache()
            elif action == "allocate":
                kept.append(torch.full((chance.randrange(1, 1 << 22),), 7.0, device="cuda"))
            elif action == "workspaces":
                torch._C._cuda_clearCublasWorkspaces()
            else:
                a = torch.randn(256, 1024, device="cuda").half()
                graph, result = record(lambda a=a: a @ a.T, device)
                graph.replay()
                assert torch.equal(result, a @ a.T), f"turn {turns}"
            assert all(bool((other == 7.0).all()) for other in kept[-2:]), f"turn {turns}"
    assert turns > 200
