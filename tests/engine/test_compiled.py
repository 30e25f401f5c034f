"""Networks and inputs out of the ordinary."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import halve
from halve.engine import compiled as of_compiled
from halve.engine import plan
from halve.engine.capture import guards as of_guards
from halve.engine.timing_cache import Memory
from halve.errors import EngineError, EngineWarning
from tests.engine.nets import Net, compiled, sparsely
from tests.tiny import convnet, images


def agree(how, example, *others, share=1e-4, **options):
    """The compiled network, after checking that it gives what the masked model gives, packed, saved and loaded too."""
    model = Net(how).eval()
    masks = halve.prune(model, also="*")
    fast = sparsely(compiled(model, masks, example, **options))
    for inputs in (example, *others):
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        with torch.no_grad():
            expected, got = halve.apply(model, masks)(*inputs), fast(*inputs)
        assert got.dtype == expected.dtype
        assert (got - expected).abs().max() <= share * expected.abs().max()
    return fast


def test_images_of_whole_numbers_give_floating_outputs():
    bytes_ = torch.randint(0, 255, (2, 4, 8, 8), dtype=torch.uint8)
    assert agree(lambda n, x: n.a(x.float() / 255), bytes_)(bytes_).dtype == torch.float32
    which = torch.tensor([1, 2])
    agree(lambda n, y, x: n.a(x) * y.reshape(-1, 1, 1, 1), (which, images(2)))


OF_A_TYPE = {
    "a softmax in single precision": lambda n, x: n.b(n.a(x).float().softmax(1).type_as(x)),
    "positions": lambda n, x: n.b(n.a(x) + torch.arange(x.shape[3], device=x.device, dtype=x.dtype)),
    "a constant that is added": lambda n, x: n.b(n.a(x)) + torch.ones(x.shape[0], 1, 1, 1) * x,
}


@pytest.mark.parametrize("name", OF_A_TYPE)
def test_code_that_names_a_type_runs_in_another(name):
    agree(OF_A_TYPE[name], images(2), images(3), share=0.05, dtype=torch.bfloat16)


def test_what_a_network_makes_along_the_way_moves_with_it():
    fast = agree(OF_A_TYPE["positions"], images(2))
    assert fast.to("meta")(images(2).to("meta")).shape == images(2).shape


def test_code_that_sets_one_image_apart_is_not_asked_for_one():
    fast = agree(lambda n, x: n.a(x)[0] if x.shape[0] == 1 else n.a(x), images(2), images(3))
    with pytest.raises(EngineError, match="2 or more"):
        fast(images(1))


def test_examples_without_a_number_of_images_are_refused():
    for example in (images(2)[:0], (images(2), torch.ones(4))):
        with pytest.raises(EngineError, match="first dimension"):
            agree(lambda n, x, *_: n.a(x), example)
    with pytest.raises(EngineError, match="meta"):
        agree(lambda n, x: n.a(x), images(2).to("meta"))
    with pytest.raises(EngineError, match=r"dtype=torch\.int8"):
        agree(lambda n, x: n.a(x), images(2), dtype=torch.int8)


def test_an_empty_batch_runs_packed():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    fast = sparsely(compiled(model, example=torch.randn(2, 8)))
    assert fast(torch.randn(0, 8)).shape == (0, 4)


def test_the_example_is_copied_and_has_no_gradient():
    x = images(64).requires_grad_()
    fast = compiled(convnet(), example=x)
    assert fast.example[0].untyped_storage().nbytes() == x[:1].nbytes
    assert not fast.example[0].requires_grad
    assert not fast(x).requires_grad
    assert not torch.compile(fast, backend="aot_eager")(x).requires_grad


def test_another_type_is_refused_where_it_is_asked_for():
    fast = compiled(convnet())
    with pytest.raises(EngineError, match=r"compile the model again with dtype=torch\.float16"):
        fast.half()
    assert fast.float()(images(2)).dtype == torch.float32


def test_shapes_that_fit_are_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr(of_compiled, "_MOST_SHAPES", 3)
    fast = compiled(convnet())
    for count in range(1, 9):
        fast(images(count))
    assert len(fast._fitting) <= 3


def test_a_device_of_which_a_constant_alone_is_elsewhere():
    fast = compiled(convnet())
    fast.body.register_buffer("constant", torch.zeros((), device="meta"))
    assert copy.deepcopy(fast).float()(images(2)).device.type == "cpu"


def test_layers_whose_channels_are_no_blocks_of_four_count_for_nothing(monkeypatch):
    monkeypatch.setattr("halve.engine.compile.missing", lambda *_: None)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    with pytest.warns(EngineWarning, match="no layer that was captured is 2:4"):
        halve.compile(model, halve.MaskSet({}), torch.randn(2, 2, 4, 4).half())


@pytest.fixture
def planned(monkeypatch):
    """A network that is planned on a CPU: times are made up, and `fail` makes the timing of whole networks fail."""
    fast = sparsely(compiled(convnet(), dtype=torch.bfloat16))
    state = {"fail": False}

    def times(ways, rounds=5):
        for call in ways.values():
            call()
        if state["fail"] and "dense" in ways:
            raise torch.OutOfMemoryError("no memory left")
        return {name: float(number) for number, name in enumerate(ways)}

    monkeypatch.setattr(plan, "graph_times", times)
    return fast, state


def forms(fast):
    names = ("weight", "values", "metadata", "twin")
    return [(layer.ways, {name for name in names if getattr(layer, name) is not None}) for layer in fast.layers]


def plan_it(fast, size):
    with torch.no_grad(), fast._as_before_if_it_fails():
        return plan.decide(fast.layers, lambda: fast._run(images(size)), Memory(None), sparse=True)


def test_planning_that_breaks_off_leaves_every_layer_as_it_was(planned):
    fast, state = planned
    before, expected = forms(fast), fast(images(2))
    state["fail"] = True
    with pytest.raises(torch.OutOfMemoryError):
        plan_it(fast, 2)
    assert forms(fast) == before
    assert torch.equal(fast(images(2)), expected)


def test_planning_keeps_the_forms_that_it_decided_for_and_no_others(planned):
    fast, _ = planned
    assert [entry.layer for entry in plan_it(fast, 2)] == [layer.name for layer in fast.layers]
    for layer, (ways, held) in zip(fast.layers, forms(fast), strict=True):
        kinds = {way.partition(" ")[0] for way in ways.values()}
        assert ("twin" in held) == ("twin" in kinds)
        assert ("values" in held) == ("sparse" in kinds)
        assert layer.dtype == torch.bfloat16


def test_on_a_device_without_sparse_kernels_it_runs_dense_and_as_before_when_it_comes_back(monkeypatch):
    fast = sparsely(compiled(convnet()))
    fast.plan.dense = None
    before, expected = forms(fast), fast(images(2))
    monkeypatch.setattr(of_compiled, "missing", lambda *_: "this is a toaster")
    with pytest.warns(EngineWarning, match="running dense: this is a toaster"):
        fast._settle(None)
    assert fast.reason == "this is a toaster"
    assert all(held == {"weight"} for _, held in forms(fast))
    torch.testing.assert_close(fast(images(2)), expected)
    monkeypatch.setattr(of_compiled, "missing", lambda *_: "this is a kettle")
    fast._settle("this is a toaster")
    assert fast.reason == "this is a kettle"
    monkeypatch.setattr(of_compiled, "missing", lambda *_: None)
    fast._settle("this is a kettle")
    assert fast.reason is None
    assert forms(fast) == before


def test_a_network_without_layers_to_halve_stays_dense_on_another_device(monkeypatch):
    fast = compiled(convnet())
    fast.plan.dense = "no layer that was captured is 2:4"
    monkeypatch.setattr(of_compiled, "missing", lambda *_: None)
    fast._settle(None)
    assert fast.reason == "no layer that was captured is 2:4"


def test_packed_weights_stay_in_order_whatever_memory_format_is_asked_for():
    fast = sparsely(compiled(convnet()))
    expected = fast(images(2))
    fast.to(memory_format=torch.channels_last)
    for layer in fast.layers:
        assert all(form is None or form.is_contiguous() for form in (layer.values, layer.metadata, layer.twin))
    assert torch.equal(fast(images(2)), expected)


def test_copies_make_recordings_of_their_own():
    recordings = of_compiled.Recordings()
    recordings.known[((2, 4, 8, 8),)] = ("graph", (), None, ())
    assert not copy.deepcopy(recordings).known


@pytest.mark.parametrize("hidden", ["the expression", "all of them"])
def test_conditions_of_sizes_that_cannot_be_understood_fix_the_size(monkeypatch, hidden):
    known = of_guards._reading

    def forgetful(node):
        if isinstance(node, of_guards.ast.BinOp):
            raise ValueError("unknown expression")
        return known(node)

    if hidden == "the expression":
        monkeypatch.setattr(of_guards, "_reading", forgetful)
    else:
        monkeypatch.setattr(of_guards, "_TOLD_AS", "_called_otherwise_in_a_later_version")
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 1)).eval()
    fast = compiled(model, halve.MaskSet({}))
    assert fast(images(3)).shape == (3, 4, 4, 4)
    with pytest.raises(EngineError, match=r"captured for \(any, 4, 8, 8\)"):
        fast(torch.randn(2, 4, 6, 6))


def test_numbers_of_any_kind_are_batch_sizes():
    fast = compiled(convnet())
    assert fast.warmup(4) is fast.warmup([np.int64(2)]) is fast
    with pytest.raises(EngineError, match="from 1 on"):
        fast.warmup(0)
