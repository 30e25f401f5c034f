"""Inductor on a CPU: it needs a C++ compiler there, and some seconds for each network."""

import contextlib
import copy
import gc
import os
import shutil
import weakref

import pytest
import torch
from torch import nn

import halve
from halve.engine import compiled, inductor
from halve.engine.compiled import INDUCTOR
from halve.engine.inductor import Bodies, CompiledBody, LayerTime, choose, compile_body
from halve.engine.kernels.kernel import Kernel
from halve.engine.plan import Entry
from halve.engine.recorded import shapes_of
from halve.engine.timing_cache import TimingCache
from halve.errors import EngineError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
pytestmark = pytest.mark.filterwarnings("ignore")
MMA_SP = Kernel("mma_sp", "64x64")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Hardtanh(), nn.Conv2d(8, 8, 3), nn.Hardtanh()).eval()


@pytest.fixture(scope="module")
def made():
    model, x = network(), torch.randn(2, 4, 8, 8)
    fast = halve.compile(model, halve.prune(model), x)
    return fast, x


@pytest.fixture
def planned(made):
    """A copy in which one layer is on a kernel of ours, which runs its reference on a CPU."""
    fast, x = copy.deepcopy(made[0]), made[1]
    fast.layers[1].use({1: MMA_SP})
    return fast, x, {layer: layer.kernel_for(1) for layer in fast.layers}


@needs_compiler
def test_our_kernels_stay_operators_and_outputs_are_the_same(planned):
    fast, x, kernels = planned
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with torch.no_grad():
        run, seconds = compile_body(fast.body, kernels, (x,))
        assert torch.allclose(run(x), fast.body(x), atol=1e-5)
    assert seconds > 0
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


class Amplifies(nn.Module):
    """Makes ten thousand times as much of a rounding error, or more."""

    def __init__(self, factor=1e4):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.sin(self.factor * x)


@pytest.mark.parametrize(("error", "refused"), [(2e-3, False), (0.1, True)])
def test_outputs_may_differ_by_what_a_network_makes_of_rounding_errors(error, refused):
    x = torch.linspace(0.9, 1.1, 64)
    body = torch.fx.symbolic_trace(Amplifies())
    expected = body(x)
    outcome = pytest.raises(EngineError, match="differs") if refused else contextlib.nullcontext()
    with outcome:
        inductor._check(expected + error, expected, body, (x,))


def test_rounding_errors_keep_the_strides_of_inputs():
    x = (torch.rand(2, 3, 4, 4) + 1).to(memory_format=torch.channels_last)
    given = []

    def body(x):
        given.append(x)
        return 1 * x

    [error] = inductor._sensitivity(body, (x,), body(x))
    assert 0 < error < 1e-6
    assert given[1].stride() == x.stride()
    assert not torch.equal(given[1], x)


def test_zeros_are_refused_however_sensitive_a_network_is():
    x = torch.linspace(0.9, 1.1, 64)
    body = torch.fx.symbolic_trace(Amplifies(1e8))
    expected = body(x)
    assert inductor._sensitivity(body, (x,), expected)[0] > 1
    inductor._check(expected + 0.2, expected, body, (x,))
    with pytest.raises(EngineError, match="differs"):
        inductor._check(torch.zeros_like(expected), expected, body, (x,))


class Vanishes(nn.Module):
    """Zero for ones, and a rounding error above that."""

    def forward(self, x):
        return (x - 1).clamp(min=0)


class Overflows(nn.Module):
    def forward(self, x):
        return x - 0.5 * x.mean()


@pytest.mark.parametrize(
    ("model", "x"), [(Vanishes(), torch.ones(2, 4)), (Overflows(), torch.full((2, 4), 65504.0, dtype=torch.float16))]
)
@pytest.mark.parametrize("wrong", [1e4, float("nan"), float("inf")])
def test_wrong_outputs_are_refused_where_rounding_errors_say_nothing(model, x, wrong):
    body = torch.fx.symbolic_trace(model)
    with pytest.raises(EngineError, match="differs"):
        inductor._check(torch.full_like(x, wrong), body(x), body, (x,))


@needs_compiler
def test_a_network_that_is_gone_leaves_no_weights_behind(planned):
    fast, x, kernels = planned
    before = inductor._generated_modules()
    with torch.no_grad():
        run, _ = compile_body(fast.body, kernels, (x,))
        run(x)
    made = inductor._generated_modules().keys() - before.keys()
    assert made
    packed = weakref.ref(fast.layers[1].packed("mma_sp")["values"])
    fast.layers[1].use({})
    assert packed() is not None  # its compiled form holds it
    del run
    for _ in range(2):  # what Inductor made, then what that held
        gc.collect()
    assert not made & inductor._generated_modules().keys()
    assert packed() is None


def test_the_fastest_form_is_chosen_and_remembered(planned, monkeypatch):
    fast, x, kernels = planned
    compiled = []

    def compile_body(body, chosen, inputs):
        compiled.append(set(chosen.values()))
        return (lambda *inputs: body(*inputs)), 1.0

    monkeypatch.setattr(inductor, "compile_body", compile_body)
    monkeypatch.setattr(inductor, "measure", lambda calls, device: dict(zip(calls, (3.0, 1.0, 2.0), strict=True)))
    cache = TimingCache(None)
    first = choose(fast.body, (x,), kernels, cache, "key")
    assert first.run is not None
    assert first.kernels == kernels
    assert first.seconds == 2.0
    assert len(compiled) == 2  # as planned, and all dense
    again = choose(fast.body, (x,), kernels, cache, "key")
    assert again.kernels == kernels
    assert len(compiled) == 3  # only the fastest


def test_dense_layers_win_where_they_are_faster(planned, monkeypatch):
    fast, x, kernels = planned
    monkeypatch.setattr(inductor, "compile_body", lambda body, chosen, inputs: (body, 1.0))
    monkeypatch.setattr(inductor, "measure", lambda calls, device: dict(zip(calls, (3.0, 2.0, 1.0), strict=True)))
    choice = choose(fast.body, (x,), kernels, TimingCache(None), None)
    assert {str(kernel) for kernel in choice.kernels.values()} == {"dense torch"}


@pytest.mark.parametrize(
    ("layers", "compiled"),
    [
        (LayerTime(planned_ms=0.99, dense_ms=1.5), []),
        (LayerTime(planned_ms=0.99, dense_ms=0.9), ["dense"]),
        (LayerTime(planned_ms=0.5, dense_ms=1.5), ["planned"]),
        (LayerTime(planned_ms=0.5, dense_ms=1.4), ["planned", "dense"]),  # Inductor fuses activations
        (LayerTime(planned_ms=0.5, dense_ms=0.9), ["planned", "dense"]),
        (LayerTime(planned_ms=0.0, dense_ms=0.0), ["planned", "dense"]),
    ],
)
def test_forms_that_cannot_be_faster_are_not_compiled(planned, monkeypatch, layers, compiled):
    fast, x, kernels = planned
    made = []

    def compile_body(body, chosen, inputs):
        made.append("planned" if chosen == kernels else "dense")
        return body, 1.0

    monkeypatch.setattr(inductor, "compile_body", compile_body)
    monkeypatch.setattr(inductor, "measure", lambda calls, device: dict.fromkeys(calls, 2.0) | {"eager": 1.0})
    cache = TimingCache(None)
    for _ in range(2):  # timed, then remembered
        choice = choose(fast.body, (x,), kernels, cache, "key", layers)
        assert (choice.run, choice.kernels) == (None, kernels)
    assert made == compiled


def test_dense_layers_are_compared_with_the_fastest_form_so_far(planned, monkeypatch):
    fast, x, kernels = planned
    made, ms = [], {"eager": 2.0, "inductor": 1.0}

    def compile_body(body, chosen, inputs):
        made.append("planned" if chosen == kernels else "dense")
        return body, 1.0

    monkeypatch.setattr(inductor, "compile_body", compile_body)
    monkeypatch.setattr(inductor, "measure", lambda calls, device: {name: ms[name] for name in calls})
    layers = LayerTime(planned_ms=0.5, dense_ms=1.8)  # could be faster than the eager network
    assert choose(fast.body, (x,), kernels, TimingCache(None), None, layers).kernels == kernels
    assert made == ["planned"]


def test_dense_layers_are_tried_if_the_planned_kernels_cannot_be_compiled(planned, monkeypatch):
    fast, x, kernels = planned

    def compile_body(body, chosen, inputs):
        if chosen == kernels:
            raise EngineError("outputs differ")
        return body, 1.0

    monkeypatch.setattr(inductor, "compile_body", compile_body)
    ms = {"eager": 2.0, "inductor dense": 1.0}
    monkeypatch.setattr(inductor, "measure", lambda calls, device: {name: ms[name] for name in calls})
    cache = TimingCache(None)
    assert choose(fast.body, (x,), kernels, cache, "key").run is not None
    assert not cache.known  # what fails now may work later
    ms["eager"] = 0.5
    assert choose(fast.body, (x,), kernels, cache, "key").failed == "outputs differ"


def test_pooling_does_not_count_as_a_dense_layer():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Hardtanh(), nn.MaxPool2d(2)).eval()
    fast = halve.compile(model, halve.prune(model), torch.randn(2, 4, 8, 8))
    entries = [
        Entry(layer.name, "", "dense torch", False, 1.0, 2.0 if layer.has_weight else 50.0, None, None, "")
        for layer in fast.layers
    ]
    assert len(entries) == 2
    fast.device = torch.device("cuda")
    assert fast._layer_time(entries, []) == LayerTime(planned_ms=2.0, dense_ms=2.0)


def test_a_network_that_inductor_cannot_compile_stays_eager(made, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fails)
    fast, x = copy.deepcopy(made[0]), made[1]
    fast.inductor = True
    expected = fast(x)
    fast.warmup(3)
    assert "no compiler here" in fast.plan.uncompiled[INDUCTOR]
    assert not fast.plan.inductor
    assert torch.equal(fast(x), expected)
    monkeypatch.setattr(compiled, "MAX_SECONDS", 0.0)  # compiling that failed took time, too
    fast.warmup(5)
    assert "not tried at batch size 5" in fast.plan.uncompiled[INDUCTOR]


def test_wrong_results_are_refused(planned, monkeypatch):
    fast, x, kernels = planned
    monkeypatch.setattr(torch, "compile", lambda module, **options: lambda x: module(x) + 1)
    with pytest.raises(EngineError, match="differs from the eager one"):
        compile_body(fast.body, kernels, (x,))


def test_a_compiled_body_runs_at_its_shape_only(made):
    fast, x = copy.deepcopy(made[0]), made[1]
    fast._bodies[(tuple(x.shape),)] = CompiledBody(lambda x: torch.zeros(2))
    assert fast(x).shape == (2,)
    assert fast(x[:1]).shape == (1, 8, 4, 4)
    assert copy.deepcopy(fast)(x).shape == (2, 8, 4, 4)  # copies are not compiled yet
    assert isinstance(copy.deepcopy(fast)._bodies, Bodies)


def test_the_plan_says_what_inductor_compiled(made):
    plan = copy.deepcopy(made[0].plan)
    plan.batches, plan.inductor = {2: []}, {2: 12.3}
    assert "the rest compiled by Inductor in 12 s" in str(plan)
    assert type(plan).from_json(plan.as_json()).inductor == {2: 12.3}


def test_no_call_compiles_again(made):
    fast, x = copy.deepcopy(made[0]), made[1]
    seen = []

    def compiled(given):
        seen.append((given.stride(), given.is_inference(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return fast.body(given)

    fast._bodies[shapes_of((x,))] = CompiledBody(compiled)
    expected = fast(x)
    assert torch.allclose(fast(x.to(memory_format=torch.channels_last)), expected, atol=1e-6)
    with torch.inference_mode():
        assert torch.allclose(fast(x), expected, atol=1e-6)
        assert torch.allclose(fast(x.clone()), expected, atol=1e-6)
    assert len(seen) == 4
    assert set(seen) == {(x.stride(), False, False, False)}


@needs_compiler
def test_calls_skip_the_checks_of_dynamo_unless_it_would_compile_again(monkeypatch):
    class Net(nn.Module):
        def forward(self, x, y):
            return {"sum": x + y, "both": [x * 2, y], "x": x}

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    body = torch.fx.symbolic_trace(Net())
    run, _ = compile_body(body, {}, (x, y))
    checked = []
    monkeypatch.setattr(run, "_checked", lambda *inputs: checked.append(inputs) or body(*inputs))
    for given in ((x, y), (y, x), (x + 1, y)):
        outputs, expected = run(*given), body(*given)
        assert torch.equal(outputs["sum"], expected["sum"])
        assert torch.equal(outputs["both"][0], expected["both"][0])
        assert torch.equal(outputs["x"], given[0])
    with torch.inference_mode():
        assert torch.equal(run(x.clone(), y)["sum"], x + y)
    assert not checked
    negative = torch.complex(x, y).conj().imag  # stored without its sign
    assert torch.equal(run(negative, y)["sum"], negative + y)
    run(nn.Parameter(x), y)
    with torch.autocast("cpu"):
        run(x, y)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    run(x, y)
    torch.set_num_threads(before)
    assert len(checked) == 4


def test_it_is_tried_on_cpus_with_a_compiler(made, monkeypatch):
    assert inductor.by_default(torch.device("cpu"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang++" else None)
    assert inductor.unavailable(torch.device("cpu")) is None


def test_without_a_compiler_the_plan_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model, x = network(), torch.randn(2, 4, 8, 8)
    fast = halve.compile(model, halve.prune(model), x, inductor=True)
    assert fast.plan.uncompiled[INDUCTOR].startswith("not used: Inductor needs a C++ compiler on CPUs")
    assert not fast.plan.inductor
