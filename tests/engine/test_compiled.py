"""Networks and inputs out of the ordinary."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import halve
from halve.engine import compiled as of_compiled
from halve.engine.compiled import SPARSE
from halve.engine.kernels.cpu_sp import features
from halve.engine.kernels.kernel import KernelFamily
from halve.engine.kernels.registry import FAMILIES
from halve.errors import DataError, EngineError, EngineWarning, OptionError
from tests.engine.nets import Net, compiled, sparsely
from tests.engine.timers import use_timer
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


def test_code_that_treats_one_image_differently_is_not_asked_for_one():
    fast = agree(lambda n, x: n.a(x)[0] if x.shape[0] == 1 else n.a(x), images(2), images(3))
    with pytest.raises(EngineError, match="2 or more"):
        fast(images(1))


def test_examples_without_a_number_of_images_are_refused():
    for example in (images(2)[:0], (images(2), torch.ones(4))):
        with pytest.raises(OptionError, match="first dimension"):
            agree(lambda n, x, *_: n.a(x), example)
    with pytest.raises(DataError, match="meta"):
        agree(lambda n, x: n.a(x), images(2).to("meta"))
    with pytest.raises(OptionError, match=r"floating-point type such as torch\.float16, got torch\.int8"):
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
    monkeypatch.setattr(of_compiled, "_MAX_SHAPES", 3)
    fast = compiled(convnet())
    for count in range(1, 9):
        fast(images(count))
    assert len(fast._valid) <= 3


def test_a_device_of_which_a_constant_alone_is_elsewhere():
    fast = compiled(convnet())
    fast.body.register_buffer("constant", torch.zeros((), device="meta"))
    assert copy.deepcopy(fast).float()(images(2)).device.type == "cpu"


def test_layers_whose_channels_are_not_blocks_of_four_do_not_count(everywhere):
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)).eval()
    masks = halve.prune(model, "magnitude", pattern="1:2", also="*")
    with pytest.warns(EngineWarning, match="no captured layer is 2:4"):
        fast = halve.compile(model, masks, torch.randn(2, 2, 4, 4))
    assert not any(entry.sparse for entry in fast.plan)


def test_without_masks_the_network_is_planned_on_dense_kernels(everywhere):
    model, x = convnet(), images(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = halve.compile(model, None, x)
    assert fast.reason is None
    assert not any(entry.sparse for entry in fast.plan)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_masks_that_no_kernel_can_use_are_noted_in_the_plan(everywhere):
    model = convnet()
    with pytest.warns(EngineWarning, match="no layer runs sparse: no captured layer is 2:4 along"):
        fast = halve.compile(model, halve.prune(model, pattern="3:4"), images(2))
    assert "no captured layer is 2:4 along" in fast.plan.uncompiled[SPARSE]
    assert "no captured layer is 2:4 along" in str(fast.plan)


def test_without_masks_nothing_warns_where_nothing_runs_sparse(monkeypatch):
    monkeypatch.setattr(features, "cpu_flags", frozenset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = halve.compile(convnet(), None, images(2))
    assert "AVX" in fast.plan.dense


class Everywhere(KernelFamily):
    """A sparse kernel for any device; `broken` makes it fail when a whole network runs on it."""

    name, sparse, version, broken = "everywhere", True, "1", False

    def unavailable(self, device, dtype):
        return None if device.type == "cpu" else f"everywhere does not run on {device.type}"

    def variants(self, piece, device):
        return ["only"] if piece.is_2_4 and piece.operation.channels % 4 == 0 else []

    def run(self, inputs, packed, operation, variant):
        return operation.reference(inputs, packed)


@pytest.fixture
def everywhere(monkeypatch, tmp_path):
    """A family that runs on this machine, and times that say it is the fastest; planning runs for real."""
    family, state = Everywhere(), {"fail": False}
    monkeypatch.setitem(FAMILIES, family.name, family)
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))

    def made_up(calls, device):
        for call in calls.values():
            call()
        if state["fail"] and "dense" in calls:
            raise torch.OutOfMemoryError("no memory left")
        return {name: -float(number) for number, name in enumerate(calls)}

    use_timer(monkeypatch, made_up)
    return state


def kernels(fast):
    return [(layer.kernels, layer.held) for layer in fast.layers]


def test_planning_that_fails_leaves_every_layer_as_it_was(everywhere):
    fast = compiled(convnet())
    assert any(entry.sparse for entry in fast.plan)
    before, expected = kernels(fast), fast(images(5))
    everywhere["fail"] = True
    with pytest.raises(torch.OutOfMemoryError):
        fast.warmup(5)
    assert kernels(fast) == before
    assert list(fast.plan.batches) == [2]
    assert torch.equal(fast(images(5)), expected)


def test_every_batch_size_has_its_plan(everywhere):
    fast = compiled(convnet(), batch_sizes=(4,))
    assert list(fast.plan.batches) == [2, 4]
    assert fast.warmup(7) is fast
    assert list(fast.plan.batches) == [2, 4, 7]
    names = {layer.name for layer in fast.layers}
    assert all({entry.layer for entry in entries} == names for entries in fast.plan.batches.values())


def test_on_a_device_without_sparse_kernels_it_runs_dense_and_as_before_when_it_comes_back(everywhere):
    fast = compiled(convnet())
    before, expected = kernels(fast), fast(images(2))
    weights = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    assert fast.reason is None
    assert any(held != ["dense"] for _, held in before)
    with pytest.warns(EngineWarning, match="running dense: .*everywhere does not run on meta"):
        fast.to("meta")
    assert "everywhere does not run on meta" in fast.reason
    assert all(held == ["dense"] for _, held in kernels(fast))
    assert fast(images(2).to("meta")).shape == expected.shape
    fast.to_empty(device="cpu").load_state_dict(weights)
    assert fast.reason is None
    assert kernels(fast) == before
    assert torch.equal(fast(images(2)), expected)


def test_a_device_without_sparse_kernels_after_another_changes_nothing_but_the_reason(everywhere, monkeypatch):
    fast = compiled(convnet())
    with pytest.warns(EngineWarning, match="everywhere does not run on meta"):
        fast.to("meta")
    monkeypatch.setattr(Everywhere, "unavailable", lambda *_: "this is a toaster")
    fast.to_empty(device="cpu")
    assert "this is a toaster" in fast.reason
    assert all(held == ["dense"] for _, held in kernels(fast))


def test_packed_weights_stay_in_order_whatever_memory_format_is_asked_for():
    fast = sparsely(compiled(convnet()))
    expected = fast(images(2))
    fast.to(memory_format=torch.channels_last)
    assert all(buffer.is_contiguous() for layer in fast.layers if layer.is_2_4 for buffer in layer.buffers())
    assert torch.equal(fast(images(2)), expected)


def test_numbers_of_any_kind_are_batch_sizes():
    fast = compiled(convnet())
    assert fast.warmup(4) is fast.warmup([np.int64(2)]) is fast
    for bad in (0, 1.5, [2, -1]):
        with pytest.raises(OptionError, match="positive integers"):
            fast.warmup(bad)


def test_a_network_saved_where_it_ran_dense_can_be_moved_to_a_device_with_sparse_kernels(
    everywhere, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        Everywhere, "unavailable", lambda self, device, dtype: None if device.type == "meta" else "needs another device"
    )
    compiled(convnet()).save(tmp_path / "net.compiled.safetensors")
    again = halve.load_compiled(tmp_path / "net.compiled.safetensors")
    assert "needs another device" in again.reason
    assert again.to("meta").reason is None
    assert again(images(2).to("meta")).shape == (2, 5)


def test_every_batch_size_that_cannot_be_recorded_is_noted(monkeypatch):
    fast = compiled(convnet())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def record(run, inputs, weights):
        if len(inputs[0]) > 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")
        return [((1, 3, 16, 16),)]

    monkeypatch.setattr(fast._recordings, "record", record)
    for size in (2, 3, 4, 3):
        fast._record((images(size),))
    failed = "RuntimeError: operation not permitted when stream is capturing"
    assert fast.plan.uncompiled[of_compiled.CUDA_GRAPH].split("; ") == [
        "dropped for batch size 1: at most 16 are kept",
        f"not recorded for batch size 3: {failed}",
        f"not recorded for batch size 4: {failed}",
    ]
