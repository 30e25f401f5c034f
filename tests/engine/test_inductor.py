"""Inductor on a CPU: it needs a C++ compiler there, and some seconds for each network."""

import contextlib
import copy
import gc
import os
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import halve
from halve.engine import compiled, inductor
from halve.engine.compiled import INDUCTOR
from halve.engine.inductor import compile_body
from halve.engine.inductor_choice import Choice
from halve.errors import EngineError
from tests.engine.nets import two_convolutions
from tests.processes import environment

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
pytestmark = pytest.mark.filterwarnings("ignore")


@needs_compiler
def test_our_kernels_stay_operators_and_outputs_are_the_same(planned_net):
    fast, x, kernels = planned_net
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with torch.no_grad():
        run, seconds = compile_body(fast.body, kernels, (x,))
        assert torch.allclose(run(x), fast.body(x), atol=1e-5)
    assert seconds > 0
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_inductor_says_nothing_of_a_cuda_toolkit_without_a_gpu(tmp_path):
    code = """
import logging, torch
torch.cuda.is_available = lambda: False
from halve.engine import inductor
inductor.load()
import torch.utils.cpp_extension
logging.getLogger("torch.utils.cpp_extension").warning("other lines come through")
"""
    toolkit = environment(CUDA_HOME=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], env=toolkit, capture_output=True, text=True, check=True)
    assert "CUDA_HOME" not in done.stderr
    assert "other lines come through" in done.stderr


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
def test_a_network_that_is_gone_leaves_no_weights_behind(planned_net):
    fast, x, kernels = planned_net
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


def test_a_network_that_inductor_cannot_compile_stays_eager(compiled_net, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fails)
    fast, x = copy.deepcopy(compiled_net[0]), compiled_net[1]
    fast.inductor = True
    expected = fast(x)
    fast.warmup(3)
    assert "no compiler here" in fast.plan.uncompiled[INDUCTOR]
    assert not fast.plan.inductor
    assert torch.equal(fast(x), expected)
    monkeypatch.setattr(compiled, "MAX_SECONDS", 0.0)  # compiling that failed took time, too
    fast.warmup(5)
    assert "not tried at batch size 5" in fast.plan.uncompiled[INDUCTOR]


def test_wrong_results_are_refused(planned_net, monkeypatch):
    fast, x, kernels = planned_net
    monkeypatch.setattr(torch, "compile", lambda module, **options: lambda x: module(x) + 1)
    with pytest.raises(EngineError, match="differs from the eager one"):
        compile_body(fast.body, kernels, (x,))


def test_the_plan_says_what_inductor_compiled(compiled_net):
    plan = copy.deepcopy(compiled_net[0].plan)
    plan.batches, plan.inductor = {2: []}, {2: 12.3}
    assert "the rest compiled by Inductor in 12 s" in str(plan)
    assert type(plan).from_json(plan.as_json()).inductor == {2: 12.3}


def test_the_plan_says_how_long_compiling_took_where_nothing_came_of_it(compiled_net, monkeypatch):
    fast, seconds = copy.deepcopy(compiled_net[0]), [4.0, 8.0]
    fast.inductor = True
    monkeypatch.setattr(compiled, "unavailable", lambda device: None)
    monkeypatch.setattr(
        compiled, "choose", lambda body, inputs, kernels, *others: Choice(kernels, None, seconds.pop(0))
    )
    said = "Inductor compiled for 12 s without a faster result"
    fast.plan.lost_seconds = 0.0
    assert said not in str(fast.warmup(3).plan)  # four seconds are not worth a line
    fast.warmup(5)
    assert said in str(fast.plan)
    assert said in fast.plan._repr_html_()
    assert not fast.plan.inductor


def test_it_is_tried_on_cpus_with_a_compiler(compiled_net, monkeypatch):
    assert inductor.by_default(torch.device("cpu"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang++" else None)
    assert inductor.unavailable(torch.device("cpu")) is None


def test_without_a_compiler_the_plan_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model, x = two_convolutions(), torch.randn(2, 4, 8, 8)
    fast = halve.compile(model, halve.prune(model), x, inductor=True)
    assert fast.plan.uncompiled[INDUCTOR].startswith("not used: Inductor needs a C++ compiler on CPUs")
    assert not fast.plan.inductor
