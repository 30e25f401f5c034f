import copy
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import halve
from halve.bench.systems import weight_bytes
from halve.engine.join import Join, _is_faster, pairs_with_shortcut, planned_joins
from halve.engine.kernels import registry
from halve.engine.kernels.kernel import KernelFamily
from halve.engine.kernels.registry import FALLBACK
from halve.engine.kernels.wgmma_sp.chained import Chained
from halve.engine.kernels.wgmma_sp.joined import JoinedSparse
from halve.engine.layer import Layer
from halve.engine.layer_times import time_layer
from halve.engine.operations import ChainedConvolution, Convolution
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError, EngineWarning
from tests.random_masks import random


class Block(nn.Module):
    """A residual block that changes the number of channels and the resolution."""

    def __init__(self, last=3, shared=False, shortcut_first=True):
        super().__init__()
        self.shortcut_first = shortcut_first
        self.one = nn.Conv2d(8, 16, 3, 2, 1)
        self.two = nn.Conv2d(16, 32, last, padding=last // 2)
        self.shortcut = nn.Conv2d(8, 32, 1, 2)
        self.norm, self.shared = nn.BatchNorm2d(32), shared

    def forward(self, x):
        if self.shortcut_first:
            added = self.norm(self.shortcut(x))
            y = self.two(torch.relu(self.one(x)))
        else:
            y = self.two(torch.relu(self.one(x)))
            added = self.norm(self.shortcut(x))
        y = torch.relu(y + added)
        return y + added if self.shared else y


class Bottlenecks(nn.Module):
    """Two residual blocks, of which the first changes the number of channels; the result of each is read twice."""

    def __init__(self):
        super().__init__()
        self.reduce = nn.ModuleList([nn.Conv2d(64, 8, 1), nn.Conv2d(256, 64, 1), nn.Conv2d(256, 64, 1)])
        self.expand = nn.ModuleList([nn.Conv2d(8, 256, 1), nn.Conv2d(64, 256, 1)])
        self.shortcut = nn.Conv2d(64, 256, 1)
        self.heads = nn.ModuleList([nn.Linear(64, 4), nn.Linear(256, 4)])

    def forward(self, x):
        y = torch.relu(self.expand[0](torch.relu(self.reduce[0](x))) + self.shortcut(x))
        z = torch.relu(self.expand[1](torch.relu(self.reduce[1](y))) + y)
        last = torch.relu(self.reduce[2](z))
        return self.heads[0](last.mean((2, 3))) + self.heads[1](z.mean((2, 3)))


class ConvolvedAndAdded(nn.Module):
    """A 1x1 convolution whose result is convolved, and added to that."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        y = self.one(x)
        return torch.relu(self.two(y) + y)


class Normalised(nn.Module):
    """A block and a norm whose name is one that joined layers get."""

    def __init__(self):
        super().__init__()
        self.block, self.joined1 = Block(), nn.GroupNorm(1, 32)

    def forward(self, x):
        return self.joined1(self.block(x))


class Slow(KernelFamily):
    """Sparse convolutions on a CPU that take their time."""

    name, sparse, version = "slow", True, "1"

    def unavailable(self, device, dtype):
        return None

    def variants(self, piece, device):
        return ["plain"] if isinstance(piece.operation, Convolution) and piece.is_2_4 else []

    def run(self, inputs, packed, operation, variant):
        time.sleep(0.003)
        weight = packed["weight"]
        return operation.reference(inputs, {name: tensor.to(weight.dtype) for name, tensor in packed.items()})


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Joined kernels on a CPU, where they run the reference; separate convolutions are slow."""
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(JoinedSparse, "unavailable", lambda self, device, dtype: None)
    monkeypatch.setattr(JoinedSparse, "variants", lambda self, piece, device: _variants(self, piece, device)[:1])
    monkeypatch.setattr(JoinedSparse, "fits", lambda self, inputs, operation, variant: True)
    monkeypatch.setattr(JoinedSparse, "promising", lambda self, inputs, operation, variants: variants)
    monkeypatch.setattr(Chained, "unavailable", lambda self, device, dtype: None)
    monkeypatch.setattr(Chained, "fits", lambda self, inputs, operation, variant: True)
    monkeypatch.setitem(registry.FAMILIES, Slow.name, Slow())
    dense = type(registry.FAMILIES["dense"])
    run = dense.run

    def slowly(self, inputs, packed, operation, variant):
        if isinstance(operation, Convolution):
            time.sleep(0.003)
        return run(self, inputs, packed, operation, variant)

    monkeypatch.setattr(dense, "run", slowly)


_variants = JoinedSparse.variants


def compiled(model, batch=2, channels=8, **options):
    x = random(batch, channels, 12, 12).bfloat16()
    model = model.eval()
    return model, x, halve.compile(model, halve.prune(model), x, dtype=torch.bfloat16, inductor=False, **options)


def joined(fast):
    return {entry.layer: entry.reason for entry in fast.plan if entry.kernel.startswith("wgmma_sp_joined ")}


@pytest.mark.parametrize("shortcut_first", [True, False])
@pytest.mark.parametrize("last", [1, 3])
def test_the_end_of_a_block_is_joined_where_that_is_faster(kernel, last, shortcut_first):
    model, x, fast = compiled(Block(last, shortcut_first=shortcut_first))
    assert joined(fast) == {
        "two": "in one kernel with shortcut: faster",
        "shortcut": "in the kernel of two",
    }
    expected = halve.apply(model, halve.prune(model)).bfloat16()(x)
    torch.testing.assert_close(fast(x), expected, atol=5e-2, rtol=5e-2)


def compiled_bottlenecks():
    model, x = Bottlenecks().eval(), random(2, 64, 4, 4).bfloat16()
    masks = halve.prune(model)
    fast = halve.compile(model, masks, x, dtype=torch.bfloat16, inductor=False)
    return x, fast, halve.apply(model, masks).bfloat16()(x)


def test_the_end_of_a_block_and_what_reads_it_are_joined(kernel, tmp_path):
    x, fast, expected = compiled_bottlenecks()
    assert {entry.layer: entry.reason for entry in fast.plan if "chained" in entry.kernel} == {
        "expand.0": "in one kernel with shortcut and reduce.1: faster",
        "shortcut": "in the kernel of expand.0",
        "reduce.1": "in the kernel of expand.0",
        "expand.1": "in one kernel with reduce.2: faster",
        "reduce.2": "in the kernel of expand.1",
    }
    torch.testing.assert_close(fast(x), expected, atol=5e-2, rtol=5e-2)
    fast.save(tmp_path / "net.compiled.safetensors")
    again = halve.load_compiled(tmp_path / "net.compiled.safetensors").warmup(2)
    assert again.plan.joins == fast.plan.joins
    assert torch.equal(again(x), fast(x))
    assert len(again._bodies) == 1
    assert again.plan.uncompiled == {}


def test_other_batch_sizes_run_separately(kernel):
    _, x, fast = compiled(Block())
    more = torch.cat([x, x])
    torch.testing.assert_close(fast(more)[:2], fast(x), atol=5e-2, rtol=5e-2)


def test_a_saved_network_is_joined_again(kernel, tmp_path):
    _, x, fast = compiled(Block())
    fast.save(tmp_path / "net.compiled.safetensors")
    again = halve.load_compiled(tmp_path / "net.compiled.safetensors")
    assert str(again.plan) == str(fast.plan)
    assert [(join.layer, join.other) for join in again.plan.joins[2]] == [("two", "shortcut")]
    again.warmup(2)
    assert torch.equal(again(x), fast(x))
    assert len(again._bodies) == 1


def test_joins_of_a_plan_that_do_not_fit_the_network_are_ignored(kernel):
    _, x, fast = compiled(Block())
    expected = fast(x)
    [join] = fast.plan.joins[2]
    for other in ({"family": "wgmma"}, {"family": "none"}, {"variant": "1x1"}, {"layer": "one"}, {"other": "two"}):
        again = copy.deepcopy(fast)
        again.plan.joins[2] = [replace(join, **other)]
        printed = again.plan.batches, again.plan.joins  # maybe by another thread meanwhile
        before = copy.deepcopy(printed)
        with pytest.warns(EngineWarning, match="slower than planned: joined layers: 1 of 1 not used at batch size 2"):
            again.warmup(2)
        torch.testing.assert_close(again(x), expected, atol=5e-2, rtol=5e-2)
        assert len(again._bodies) == 0
        assert again.plan.uncompiled == {"joined layers": "1 of 1 not used at batch size 2: no kernel here"}
        assert again.plan.joins == {}
        assert printed == before


def test_the_plan_shows_what_runs_where_planned_joins_cannot_be_had(kernel, tmp_path, monkeypatch):
    _, x, fast = compiled(Bottlenecks(), channels=64)
    apart = {layer.name: str(layer.kernel_for(x.shape[0] * 12 * 12)) for layer in fast.layers}
    assert len(fast.plan.joins[2]) == 3
    fast.save(tmp_path / "net.compiled.safetensors")
    monkeypatch.setattr(Chained, "unavailable", lambda self, device, dtype: "another GPU")
    with pytest.warns(EngineWarning, match="slower than planned"):
        again = halve.load_compiled(tmp_path / "net.compiled.safetensors").warmup(2)
    shown = {entry.layer: entry for entry in again.plan}
    assert shown["expand.0"].kernel.startswith("wgmma_sp_joined ")  # its shortcut is still joined
    assert shown["expand.0"].reason == "in one kernel with shortcut: faster"
    for name in ("reduce.1", "expand.1", "reduce.2"):
        assert shown[name].kernel == apart[name]
        assert shown[name].time_ms is None
        assert shown[name].reason == "planned in one kernel with its neighbour, which is not used here"
    assert "joined layers: 2 of 3 not used at batch size 2: no kernel here" in str(again.plan)
    assert "wgmma_chained" not in str(again.plan)
    assert torch.equal(again(x), again(x))
    torch.testing.assert_close(again(x), fast(x), atol=5e-2, rtol=5e-2)


def test_the_weights_of_joined_layers_are_memory(kernel):
    _, _, fast = compiled(Block())
    [form] = fast._bodies.values()
    [both] = [layer for layer in form.modules() if isinstance(layer, Layer) and " + " in layer.name]
    separate = sum(t.untyped_storage().nbytes() for t in fast.buffers())
    assert weight_bytes(fast) == separate + sum(t.untyped_storage().nbytes() for t in both.buffers())


def test_an_updated_checkpoint_takes_over_the_joins(kernel):
    model, x, fast = compiled(Block())
    updated = copy.deepcopy(model)
    updated.two.weight.data *= 1.01
    masks = halve.prune(model)
    again = halve.compile(
        *(updated, masks, x), dtype=torch.bfloat16, inductor=False, plan_from=fast, on_changed="ignore"
    )
    assert again.plan.joins == fast.plan.joins
    expected = halve.apply(updated, masks, on_changed="ignore").bfloat16()(x)
    torch.testing.assert_close(again(x), expected, atol=5e-2, rtol=5e-2)


def test_joins_of_layers_that_are_dense_here_are_not_taken_over(kernel):
    model, x, fast = compiled(Block())
    for layer in fast.layers:
        layer.use({1: FALLBACK})  # only the joined kernel is sparse
    for dense in ("two", "shortcut"):
        masks = halve.prune(model, exclude=dense)
        with pytest.raises(EngineError, match=f"layer {dense} is 2:4 in plan_from= but not here"):
            halve.compile(model, masks, x, dtype=torch.bfloat16, inductor=False, plan_from=fast)


def test_joins_of_layers_that_do_not_run_are_ignored(kernel):
    _, x, fast = compiled(Block())
    [join] = fast.plan.joins[2]
    assert planned_joins(fast.body, [join], {}, x.device) == []


def test_other_joins_with_the_same_kernels_are_timed_again(kernel, monkeypatch):
    model = nn.Sequential(Block(), nn.Conv2d(32, 8, 1), nn.ReLU(), Block()).eval()
    x = random(2, 8, 12, 12).bfloat16()
    fast = halve.compile(model, halve.prune(model), x, dtype=torch.bfloat16, inductor=False)
    times = iter([{"separate": 1.0, "joined": 2.0}, {"separate": 2.0, "joined": 1.0}])
    monkeypatch.setattr("halve.engine.join.measure", lambda calls, device: next(times))
    kernels, cache = dict.fromkeys(fast.layers, FALLBACK), TimingCache(None)
    joins = [Join(pair, pair.joined(), FALLBACK) for pair in pairs_with_shortcut(fast.body)]
    for _ in range(2):
        assert [_is_faster(fast.body, [one], kernels, (x,), cache, "key") for one in joins] == [False, True]


def test_a_small_result_that_is_wrong_is_noticed_beside_a_large_one(kernel, monkeypatch):
    chain = ChainedConvolution(256, 8, "relu", 64, "none")
    weights = {"weight": random(256, 8, 1, 1), "next_weight": random(64, 256, 1, 1) * 1e-5}
    layer = Layer("both", chain, {name: weight.bfloat16() for name, weight in weights.items()})
    inputs = [random(1, 8, 2, 2).bfloat16(), random(1, 256, 2, 2).bfloat16()]

    def families():
        return {kernel.family for kernel in time_layer(layer, inputs, TimingCache(None), inputs[0].device, True).times}

    assert families() == {"dense", "wgmma_chained"}
    run = Chained.run

    def wrong(self, inputs, packed, operation, variant):
        both = run(self, inputs, packed, operation, variant)
        operation.split(both, inputs[0].shape)[1].zero_()
        return both

    monkeypatch.setattr(Chained, "run", wrong)
    assert families() == {"dense"}


def test_a_result_that_something_else_reads_is_not_joined(kernel):
    model, x, fast = compiled(Block(shared=True))
    assert joined(fast) == {}
    torch.testing.assert_close(fast(x), halve.apply(model, halve.prune(model)).bfloat16()(x), atol=5e-2, rtol=5e-2)


def test_a_result_that_is_also_convolved_is_not_joined(kernel):
    model, x, fast = compiled(ConvolvedAndAdded())
    assert joined(fast) == {}
    torch.testing.assert_close(fast(x), halve.apply(model, halve.prune(model)).bfloat16()(x), atol=5e-2, rtol=5e-2)


def test_joined_layers_leave_modules_of_the_same_name_alone(kernel):
    model, x, fast = compiled(Normalised())
    assert set(joined(fast)) == {"block.two", "block.shortcut"}
    torch.testing.assert_close(fast(x), halve.apply(model, halve.prune(model)).bfloat16()(x), atol=5e-2, rtol=5e-2)


def test_nothing_is_joined_without_kernels_for_it(kernel, monkeypatch):
    monkeypatch.setattr(JoinedSparse, "variants", lambda self, piece, device: ())
    _, _, fast = compiled(Block())
    assert joined(fast) == {}
