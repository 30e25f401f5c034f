"""Networks on the CPU kernels, from `compile` to files, threads and other devices."""

import copy
import threading

import pytest
import torch
from torch import nn

import halve
from halve.engine.kernels import kernel
from halve.engine.kernels.cpu_sp import features
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, FAMILIES, family_of
from halve.errors import EngineWarning
from tests.engine.kernels.cpu_sp.layers import in_child
from tests.engine.timers import use_timer
from tests.random_masks import random

pytestmark = pytest.mark.cpu_kernels
SPARSE, DENSE = Kernel("cpu_sp", "avx512"), Kernel("cpu", "avx512")


class Block(nn.Module):
    """A residual block, as in ResNets."""

    def __init__(self, channels, width, stride=1):
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width))
        self.conv2 = nn.Sequential(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Conv2d(channels, width, 1, stride)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Block(16, 32), Block(32, 40, 2))
        self.mlp = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 40))
        self.head = nn.Linear(40, 5)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        tokens = x.flatten(2).transpose(1, 2)
        return self.head((tokens + self.mlp(tokens)).mean(1)), x


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = Net().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


@pytest.fixture(autouse=True)
def chosen(monkeypatch, tmp_path):
    """Times that say that our kernels are the fastest, the sparse ones first. Planning runs for real."""
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path / "cache"))

    def made_up(calls, device):
        for call in calls.values():
            call()
        order = ("cpu_sp", "cpu", "above", "dense")
        return {name: float(next(i for i, prefix in enumerate(order) if name.startswith(prefix))) for name in calls}

    use_timer(monkeypatch, made_up)


def compiled(net, x, **options):
    return halve.compile(net, halve.prune(net), x, **options)


def expected(net, x):
    with torch.no_grad():
        return halve.apply(net, halve.prune(net))(x)


@pytest.mark.parametrize("size", [(2, 3, 40, 36), (1, 3, 33, 47)])
def test_a_network_computes_what_the_masked_model_does(net, size):
    x = random(*size)
    fast = compiled(net, x)
    assert fast.reason is None
    kernels = {layer.name: next(iter(layer.kernels.values())) for layer in fast.layers}
    assert kernels["stem.0"] == DENSE
    assert kernels["head"] == FALLBACK  # a dense layer on one or two rows
    assert {kernels[name] for name in kernels if "blocks" in name or "mlp" in name} == {SPARSE}
    torch.testing.assert_close(fast(x), expected(net, x), rtol=1e-4, atol=1e-5)
    for batch in (1, 3, 17):
        more = random(batch, *size[1:])
        torch.testing.assert_close(fast(more), expected(net, more), rtol=1e-4, atol=1e-5)


def test_bfloat16(net):
    x = random(2, 3, 40, 36)
    if (reason := FAMILIES["cpu_sp"].unavailable(torch.device("cpu"), torch.bfloat16)) is not None:
        pytest.skip(reason)
    fast = compiled(net, x, dtype=torch.bfloat16)
    assert sum(entry.sparse for entry in fast.plan) == 8
    for mine, theirs in zip(fast(x), expected(net, x), strict=True):
        assert mine.dtype == torch.float32
        assert float((mine - theirs).norm() / theirs.norm()) < 0.03


def test_other_image_sizes(net):
    x = random(2, 3, 40, 36)
    fast = compiled(net, x, any_size=True)
    for size in ((48, 64), (36, 40)):
        torch.testing.assert_close(fast(random(2, 3, *size)), expected(net, random(2, 3, *size)), rtol=1e-4, atol=1e-5)


def test_outputs_have_no_gaps_between_channels(net):
    logits, features = compiled(net, random(2, 3, 40, 36))(random(2, 3, 40, 36))
    assert logits.is_contiguous()
    assert features.is_contiguous()
    assert features.untyped_storage().nbytes() == features.numel() * 4


def test_neighbours_keep_the_layout(net, monkeypatch):
    fast, converted = compiled(net, random(2, 3, 40, 36)), []
    to_planes = kernel.to_planes

    def counted(x, channel_dim):
        y = to_planes(x, channel_dim)
        if y is not x:
            converted.append(tuple(x.shape))
        return y

    monkeypatch.setattr(kernel, "to_planes", counted)
    fast(random(2, 3, 40, 36))
    assert converted == []


def test_saved_and_loaded(net, tmp_path):
    x = random(2, 3, 40, 36)
    fast = compiled(net, x)
    fast.save(tmp_path / "net.pt2")
    code = next(layer for layer in fast.layers if SPARSE in layer.kernels.values())
    assert set(code.packed("cpu_sp")) == {"values", "codes", "bias"}  # no machine code
    again = halve.load_compiled(tmp_path / "net.pt2")
    assert [layer.kernels for layer in again.layers] == [layer.kernels for layer in fast.layers]
    assert again.plan == fast.plan
    for batch in (1, 2, 5):
        for mine, theirs in zip(again(random(batch, 3, 40, 36)), fast(random(batch, 3, 40, 36)), strict=True):
            assert torch.equal(mine, theirs)


def test_the_plan_says_how_large_the_machine_code_is(net, tmp_path):
    """Equal layers share code, which counts once; layers that are dense have none."""
    equal = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)), nn.Sigmoid()).eval()
    x = random(1, 16, 12, 12)
    with torch.no_grad():
        for layer in equal[1:3]:
            layer.weight.copy_(2 * equal[0].weight)  # other values, the same pattern
    fast = compiled(equal, x, inductor=False)
    one, two, three = (layer.emitted() for layer in fast.layers)
    assert [one] == [two] == [three]
    assert fast.code_bytes == one[0].size > 7 * 16 * 9 * 8
    assert fast.plan.code_bytes == fast.code_bytes
    assert f"machine code: {fast.code_bytes / 1e3:.2f} kB" in str(fast.plan)
    assert "machine code: " in fast.plan._repr_html_()
    fast.save(tmp_path / "net.pt2")
    assert halve.load_compiled(tmp_path / "net.pt2").plan.code_bytes == fast.code_bytes  # of this CPU: emitted again
    other = compiled(net, random(2, 3, 40, 36), inductor=False)
    assert other.code_bytes == sum(code.size for layer in other.layers for code in layer.emitted()) > fast.code_bytes
    with pytest.warns(EngineWarning):
        dense = other.fall_back("none is wanted")
    assert dense.code_bytes == dense.plan.code_bytes == 0
    assert "machine code" not in str(dense.plan)


def test_results_do_not_share_memory():
    """Small results and large ones, which are in memory that is used again: who writes into one changes no other."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.one = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 64, 1)
            self.two = nn.Conv2d(64, 64, 3, 2, 1)

        def forward(self, x):
            x = torch.relu(self.trunk(x))
            return x, self.one(x), self.two(x)

    torch.manual_seed(0)
    heads = Heads().eval()
    for x in (random(1, 16, 8, 8), random(2, 16, 64, 64)):
        fast = compiled(heads, x)
        results, again = fast(x), fast(x)
        for place, result in enumerate(results):
            others = [one for number, one in enumerate((*results, *again)) if number != place]
            before = [one.clone() for one in others]
            result.untyped_storage().fill_(1)
            assert all(map(torch.equal, others, before))


def test_a_file_runs_dense_where_there_is_no_avx512(net, tmp_path, monkeypatch):
    x = random(2, 3, 40, 36)
    compiled(net, x).save(tmp_path / "net.pt2")
    monkeypatch.setattr(features, "cpu_flags", frozenset)
    with pytest.warns(EngineWarning, match="running dense: our CPU kernels need AVX-512"):
        again = halve.load_compiled(tmp_path / "net.pt2")
    assert all(layer.held == ["dense"] for layer in again.layers)
    torch.testing.assert_close(again(x), expected(net, x), rtol=1e-4, atol=1e-5)


def test_a_network_from_a_gpu_is_planned_again(net, tmp_path):
    x = random(2, 3, 40, 36)
    fast = compiled(net, x)
    before = [dict(layer.kernels) for layer in fast.layers]
    for layer in fast.layers:  # as if it had been planned on a GPU
        layer.use({size: Kernel("mma_sp", "64x64") if layer.is_2_4 else FALLBACK for size in layer.kernels})
    fast.device = torch.device("cuda:0")
    fast.save(tmp_path / "net")
    again = halve.load_compiled(tmp_path / "net", device="cpu")
    assert [layer.kernels[max(layer.kernels)] for layer in again.layers] == [one[max(one)] for one in before]
    assert any(entry.sparse for entry in again.plan)
    torch.testing.assert_close(again(x), expected(net, x), rtol=1e-4, atol=1e-5)
    fast.device = torch.device("cpu")
    assert fast.drop_foreign_plan(fast.device)
    assert {kernel for layer in fast.layers for kernel in layer.kernels.values()} == {FALLBACK}
    assert not fast.plan.batches
    torch.testing.assert_close(fast(x), expected(net, x), rtol=1e-4, atol=1e-5)


def test_copies_and_updated_weights(net):
    x = random(2, 3, 40, 36)
    fast = compiled(net, x)
    outputs = fast(x)
    twin = copy.deepcopy(fast)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(twin(x), outputs, strict=True))
    state = {name: tensor * 2 if tensor.is_floating_point() else tensor for name, tensor in fast.state_dict().items()}
    twin.load_state_dict(state)
    assert not torch.equal(twin(x)[0], outputs[0])
    assert torch.equal(fast(x)[0], outputs[0])


def test_torch_compile_sees_one_operator_per_layer(net):
    x = random(2, 3, 40, 36)
    fast = compiled(net, x)
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    again = torch.compile(fast, backend=backend, fullgraph=True)
    for mine, theirs in zip(again(x), fast(x), strict=True):
        assert torch.equal(mine, theirs)
    assert sum("run_kernel" in target for target in seen) == len(fast.layers)
    torch.testing.assert_close(torch.compile(fast, backend="aot_eager")(x), expected(net, x), rtol=1e-4, atol=1e-5)


def test_several_networks_and_threads_at_once(net):
    x = random(2, 3, 40, 36)
    networks = [compiled(net, x), compiled(net, x)]
    outputs, wrong = networks[0](x)[0], []

    def work(fast):
        for _ in range(10):
            if not torch.equal(fast(x)[0], outputs):
                wrong.append(fast)

    threads = [threading.Thread(target=work, args=(fast,)) for fast in networks * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process(net):
    x = random(2, 3, 40, 36)
    fast = compiled(net, x)
    outputs = fast(x)[0]

    def forked():
        assert torch.equal(fast(x)[0], outputs)

    assert in_child(forked) == 0


def test_a_slow_kernel_is_not_used(net, monkeypatch):
    use_timer(monkeypatch, lambda calls, device: {one: 1.0 if one.startswith("dense") else 2.0 for one in calls})
    fast = compiled(net, random(2, 3, 40, 36))
    assert all(family_of(kernel).library for layer in fast.layers for kernel in layer.kernels.values())
    assert fast.reason is None


def test_calls_in_other_threads_do_not_disturb_planning(net):
    """Layers switch kernels while a batch size is planned, and what other threads run is not what is timed."""
    x = torch.randn(3, 3, 45, 33)
    fast = halve.compile(net, halve.prune(net), x, inductor=False)
    expected, stop, wrong = fast(x), threading.Event(), []

    def call():
        while not stop.is_set():
            try:
                if not torch.allclose(fast(x)[0], expected[0], atol=1e-4):
                    wrong.append("another result")
                str(fast.plan), copy.deepcopy(fast.plan)
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for size in (20, 21, 22):
            fast.warmup(size, progress=False)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    for size in (20, 21, 22):
        shapes = [
            entry.shape
            for entry in fast.plan.batches[size]
            if " at " in entry.shape and "x" in entry.shape.split(" at ")[1]
        ]
        assert shapes
        assert all(f" at {size} x" in shape for shape in shapes), shapes
