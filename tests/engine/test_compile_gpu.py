"""Compiled networks on a GPU: plans, recordings, threads, streams, files."""

import copy
import threading

import pytest
import torch
import torchvision
from torch import nn

import halve
from halve.engine import recorded
from halve.engine.kernels.cuda import driver
from halve.engine.kernels.registry import FALLBACK
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError, EngineWarning
from tests.engine.timers import use_timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*deprecated:DeprecationWarning"),  # torch
    pytest.mark.skipif(
        not torch.cuda.is_available() or driver.unavailable(torch.device("cuda")) is not None, reason="no fitting GPU"
    ),
]


def shared(test):
    """Mark a test of the network that many tests share: they run in one process, which begins first."""
    return pytest.mark.long(pytest.mark.xdist_group("made")(test))


def keep_timings(patch, folder):
    """Keep timings in this folder. Compiled kernels stay in the user's cache: compiling them takes minutes."""
    patch.setattr(TimingCache, "of", classmethod(lambda cls, device: cls(folder / "timings.json")))


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """Do not use cached timings of other runs, nor Inductor, which takes long: see test_inductor_gpu.py."""
    patch = pytest.MonkeyPatch()
    patch.setattr("halve.engine.compiled.by_default", lambda device: False)
    keep_timings(patch, tmp_path_factory.mktemp("timings"))
    yield
    patch.undo()


def network(name="resnet18"):
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=100).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


def photos(count, size=64, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator, device="cuda").half()


@pytest.fixture(scope="module")
def pruned():
    model = network()
    return model, halve.prune(model)


@pytest.fixture(scope="module")
def made(pruned):
    """A network that most tests share: run them in one process (`pytest --dist loadgroup`)."""
    model, masks = pruned
    fast = halve.compile(model, masks, photos(2), batch_sizes=(1, 8), any_size=True)
    return model, masks, fast


def reference(model, masks, x):
    with torch.no_grad():
        return halve.apply(model, masks).to(x.device)(x.float())


def close(got, expected, share=0.02):
    assert (got.float() - expected).abs().max() < share * expected.abs().max()


def in_threads(calls):
    threads = [threading.Thread(target=call[0], args=call[1:]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@shared
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 13])
def test_every_batch_size_matches_the_masked_network(made, batch):
    model, masks, fast = made
    x = photos(batch, seed=batch)
    close(fast(x), reference(model, masks, x))
    wide = torch.randn(batch, 3, 96, 64, device="cuda").half()
    close(fast(wide), reference(model, masks, wide))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "convnext_tiny", "mobilenet_v3_small", "efficientnet_b0"])
def test_networks_on_our_kernels_throughout_are_correct(name):
    model = network(name)
    masks = halve.prune(model)
    fast = halve.compile(model, masks, photos(2))
    x = photos(5)
    for family in ("mma_sp", "mma"):
        for layer in fast.layers:
            ours = [kernel for kernel in layer.available_kernels(x.device) if kernel.family == family]
            if ours:
                layer.use({1: ours[len(layer.name) % len(ours)]})
        close(fast(x), reference(model, masks, x), 0.05)


@shared
def test_the_plan_names_every_layer_and_why(made):
    _, masks, fast = made
    assert set(fast.plan.batches) == {1, 2, 8}
    for entries in fast.plan.batches.values():
        assert set(masks) <= {entry.layer for entry in entries}
        assert all(entry.dense_ms > 0 and entry.reason for entry in entries)
        alone = [entry for entry in entries if not entry.reason.startswith("in the kernel of")]
        assert all(entry.time_ms > 0 for entry in alone)
    assert "resnet" not in str(fast.plan)
    assert "layer4.1.conv2" in str(fast.plan)


@shared
def test_outputs_are_not_overwritten_and_are_bit_identical(made):
    fast = made[2]
    x, y = photos(2), photos(2, seed=1)
    first = fast(x)
    kept = first.clone()
    fast(y)
    assert torch.equal(first, kept)
    assert all(torch.equal(fast(x), kept) for _ in range(5))


@shared
def test_threads_and_streams_do_not_mix(made):
    fast = made[2]
    batches = [photos(2 + index % 3, seed=index) for index in range(8)]
    expected = [fast(x) for x in batches]
    torch.cuda.synchronize()
    wrong = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = fast(batches[index])
                if not torch.equal(got, expected[index]):
                    wrong.append(index)

    in_threads([(work, index) for index in range(8)])
    assert not wrong


@shared
def test_two_networks_at_once(made):
    first = made[2]
    model = network("resnet34")
    masks = halve.prune(model)
    second = halve.compile(model, masks, photos(2))
    x = photos(2)
    expected, wrong = (first(x), second(x)), []

    def work(net, wanted):
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong.extend("another result" for _ in range(20) if not torch.equal(net(x), wanted))

    in_threads([(work, first, expected[0]), (work, second, expected[1])])
    assert not wrong


def test_two_networks_are_compiled_at_once(monkeypatch, tmp_path):
    keep_timings(monkeypatch, tmp_path)
    benchmark, found = torch.backends.cudnn.benchmark, {}

    def work(name):
        model = network(name)
        masks = halve.prune(model)
        found[name] = halve.compile(model, masks, photos(2))(photos(2)), reference(model, masks, photos(2))

    in_threads([(work, "resnet18"), (work, "resnet34")])
    assert len(found) == 2
    for got, expected in found.values():
        close(got, expected)
    assert torch.backends.cudnn.benchmark == benchmark


@shared
def test_the_number_of_recordings_is_limited(made, monkeypatch):
    monkeypatch.setattr(recorded, "MAX_RECORDINGS", 2)
    fast = copy.deepcopy(made[2])
    recordings = fast.warmup([8])._recordings
    x = photos(8)
    expected, old = fast(x), recordings.of((x,))
    fast.warmup([1, 2])
    assert len(recordings.known) == 2
    assert recordings.of((x,)) is None
    assert "dropped for batch size 8" in fast.plan.uncompiled["CUDA graph"]
    assert torch.equal(recordings.replay((x,), old), expected)  # a call that found it before it was dropped


@shared
def test_a_recording_keeps_the_weights_that_it_reads(made):
    fast = copy.deepcopy(made[2]).warmup([2])
    x = photos(2)
    expected = fast(x)
    for layer in fast.layers:  # like planning, if another batch size chooses another kernel
        ours = [kernel for kernel in layer.available_kernels(x.device) if kernel.family == "mma"]
        layer.use({1: (ours or [FALLBACK])[0]})
    filled = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    assert torch.equal(fast(x), expected)
    assert len(filled) == 64


@shared
def test_recordings_made_in_inference_mode_work_outside_of_it(made):
    x = photos(2)
    with torch.inference_mode():
        fast = copy.deepcopy(made[2]).warmup([2])
        expected = fast(x)
    assert fast._recordings.of((x,)) is not None
    assert torch.equal(fast(x), expected)
    with torch.inference_mode():
        assert torch.equal(fast(x), expected)


def test_calls_work_while_another_batch_size_is_planned(pruned):
    model, masks = pruned
    fast = halve.compile(model, masks, photos(2))
    recorded_, other = photos(2), photos(3)
    expected, near = fast(recorded_), reference(model, masks, other)
    worker = threading.Thread(target=fast.warmup, args=([5, 6],))
    worker.start()
    while worker.is_alive():
        assert torch.equal(fast(recorded_), expected)
        close(fast(other), near)
    worker.join()
    assert {2, 5, 6} <= set(fast.plan.batches)


@shared
def test_nothing_is_timed_twice(made, monkeypatch):
    model, masks, _ = made

    def refuse(*args, **kwargs):
        raise AssertionError("timed again")

    use_timer(monkeypatch, refuse)
    halve.compile(model, masks, photos(2))


@shared
def test_an_updated_checkpoint_reuses_the_plan_without_timing(made, monkeypatch):
    model, masks, fast = made
    updated = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in updated.parameters():
            parameter.mul_(1.05)
    monkeypatch.setattr("halve.engine.compiled.decide", None)
    new = halve.compile(updated, masks, photos(2), on_changed="ignore", plan_from=fast)
    assert [layer.kernels for layer in new.layers] == [layer.kernels for layer in fast.layers]
    x = photos(8)
    with torch.no_grad():
        close(new(x), halve.apply(updated, masks, on_changed="ignore").cuda()(x.float()))


@shared
def test_saving_loading_copying_and_moving_keep_the_outputs(made, tmp_path):
    fast = made[2]
    x = photos(2)
    expected = fast(x)
    fast.save(tmp_path / "net.compiled.safetensors")
    again = halve.load_compiled(tmp_path / "net.compiled.safetensors")
    assert torch.equal(again(x), expected)
    assert str(again.plan) == str(fast.plan)
    copied = copy.deepcopy(fast)
    close(copied(x), expected.float())  # without joined layers until `warmup`
    assert torch.equal(copied.warmup([2])(x), expected)
    with pytest.warns(EngineWarning, match="running dense: our CPU kernels need"):
        there = copy.deepcopy(fast).cpu()
    assert all(layer.kernel_for(1) == FALLBACK for layer in there.layers)
    close(there(x.cpu()).cuda(), expected.float())
    close(there.cuda()(x), expected.float())
    assert torch.equal(there.warmup([2])(x), expected)
    assert there.reason is None
    shuffled = copy.deepcopy(fast).to(memory_format=torch.channels_last)
    close(shuffled(x), expected.float())
    assert torch.equal(shuffled.warmup([2])(x), expected)


@shared
def test_a_network_compiled_on_a_cpu_runs_sparse_after_moving_to_a_gpu(made):
    model, masks, _ = made
    with pytest.warns(EngineWarning, match="our CPU kernels need"):
        fast = halve.compile(model, masks, photos(1).cpu())
    fast = fast.cuda().warmup([1])
    assert fast.reason is None
    assert any(entry.sparse for entry in fast.plan)
    close(fast(photos(1)), reference(model, masks, photos(1)))


def test_masks_with_channel_orders_run_sparse():
    model = network()
    masks = halve.prune(model, permute=True, permute_seconds=5, example=torch.randn(2, 3, 64, 64))
    fast = halve.compile(model, masks, photos(2))
    assert {layer.name for layer in fast.layers if layer.is_2_4} == set(masks)
    close(fast(photos(3)), reference(model, masks, photos(3)))


def test_single_precision_runs_dense_and_says_why(pruned):
    model, masks = pruned
    with pytest.warns(EngineWarning, match=r"float16 or bfloat16, got torch\.float32: pass dtype"):
        fast = halve.compile(model, masks, photos(2).float())
    close(fast(photos(2).float()), reference(model, masks, photos(2)), 0.01)
    half = halve.compile(model, masks, photos(2).float(), dtype=torch.bfloat16)
    got = half(photos(2).float())
    assert got.dtype == torch.float32
    close(got, reference(model, masks, photos(2)), 0.1)


@shared
def test_a_wrong_device_or_dtype_raises(made):
    fast = made[2]
    with pytest.raises(EngineError, match="move one of them"):
        fast(photos(2).cpu())
    with pytest.raises(EngineError, match="convert the input"):
        fast(photos(2).float())


@shared
def test_it_works_with_torch_compile(made):
    fast = made[2]
    x = photos(2)
    close(torch.compile(fast)(x), fast(x).float())


@shared
def test_it_can_be_captured_in_a_users_own_cuda_graph(made):
    fast = made[2]
    x = photos(2)
    expected = fast(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    graph.replay()
    close(y, expected.float())
