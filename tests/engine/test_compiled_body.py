"""Calls of networks that Inductor compiled, on a CPU: it needs a C++ compiler there."""

import copy
import shutil

import pytest
import torch
from torch import nn

from halve.engine.compiled_body import CompiledBody
from halve.engine.inductor import compile_body
from halve.engine.recorded import shapes_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_no_call_compiles_again(compiled_net):
    fast, x = copy.deepcopy(compiled_net[0]), compiled_net[1]
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
