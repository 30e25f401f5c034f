"""Chains compute exactly what their layers do one by one, and touch only their buffers."""

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halve.engine.kernels.cpu_sp import chain
from halve.engine.kernels.cpu_sp.chain import Chain, can_chain
from halve.engine.kernels.cpu_sp.family import CpuPool
from halve.engine.kernels.kernel import ChainDescription, ChainedLayer, Kernel, Link
from halve.engine.operations import Convolution, Linear, MaxPool, PooledConvolution
from halve.errors import EngineError
from tests.engine.kernels.cpu_sp.layers import FAMILIES, Guarded, in_child, random, weights_of

pytestmark = pytest.mark.cpu_kernels
ALL = {**FAMILIES, "cpu_pool": CpuPool()}
POOL = MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False)


def conv(rows, channels, kernel=3, stride=1, activation="relu"):
    padding = (kernel // 2, kernel // 2)
    return Convolution(rows, channels, (kernel, kernel), (stride, stride), padding, activation=activation)


def link(operation, inputs, family="cpu_sp", dtype=torch.float32):
    if isinstance(operation, MaxPool):
        return Link(operation, Kernel("cpu_pool", "avx512"), {}, inputs)
    layer = operation.convolution if isinstance(operation, PooledConvolution) else operation
    packed = FAMILIES[family].pack(operation, weights_of(layer, family, dtype))
    return Link(operation, Kernel(family, "avx512"), packed, inputs)


def described(links, outputs):
    """The description of a chain, and its tensors."""
    layers = [ChainedLayer(one.operation.to_json(), one.kernel, tuple(one.packed), one.inputs) for one in links]
    text = ChainDescription(tuple(layers), tuple(outputs)).to_json()
    return ChainDescription.from_json(text), [tensor for one in links for tensor in one.packed.values()]


def run_chain(inputs, links, outputs):
    description, packed = described(links, outputs)
    return chain.run_chain(inputs, packed, description)


def chain_of(links, outputs):
    """The chain that ran last with these layers."""
    description, packed = described(links, outputs)
    return chain._chains[id(packed[0]), id(description)]


def residual_network(dtype=torch.float32):
    """A first layer with pooling, a block with a residual, one with stride 2 and a shortcut, and pooling."""
    stem = PooledConvolution(20, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1))
    return [
        link(stem, (0,), "cpu", dtype),  # 1
        link(conv(40, 20, 1), (1,), dtype=dtype),
        link(conv(20, 40), (2, 1), dtype=dtype),
        link(conv(36, 20, 3, 2), (3,), dtype=dtype),  # 4
        link(conv(36, 20, 1, 2, "none"), (3,), dtype=dtype),
        link(conv(36, 36), (4, 5), dtype=dtype),
        link(POOL, (6,), dtype=dtype),  # 7
    ]


def one_by_one(inputs, links, outputs):
    values = [*inputs]
    for one in links:
        family = ALL[one.kernel.family]
        given_values = family.laid_out([values[number] for number in one.inputs], one.operation)
        values.append(family.run(given_values, one.packed, one.operation, "avx512"))
    return [values[number] for number in outputs]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 3, 64, 64), (2, 3, 64, 64), (6, 3, 64, 64), (7, 3, 64, 64), (2, 3, 37, 50)])
def test_a_chain_computes_what_its_layers_do(shape, workers, dtype, threads):
    threads(workers)
    links, outputs = residual_network(dtype), (7, 3, 6)
    x = random(*shape).to(dtype)
    for given_x in (x, x.to(memory_format=torch.channels_last)):
        got = run_chain([given_x], links, outputs)
        for y, expected in zip(got, one_by_one([x], links, outputs), strict=True):
            assert torch.equal(y, expected)
            assert y.stride() == expected.stride()


def test_images_with_whole_vectors_run_one_by_one(threads, monkeypatch):
    groups = []
    original = chain.Together
    monkeypatch.setattr(chain, "Together", lambda *args: groups.append(len(args[0])) or original(*args))
    links = [link(conv(20, 8), (0,)), link(conv(8, 20), (1, 0))]
    threads(2)
    for shape, expected in (((2, 8, 8, 8), [2]), ((3, 8, 8, 8), []), ((1, 8, 8, 8), []), ((2, 8, 7, 7), [])):
        groups.clear()
        [y] = run_chain([random(*shape)], links, (2,))
        assert groups == expected
        assert torch.equal(y, one_by_one([random(*shape)], links, (2,))[0])


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 3]), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from([(4, 4), (8, 8), (5, 7)]),
    st.integers(1, 2),
    st.data(),
)
def test_chains_of_any_form(layers, images, size, inputs, data):
    links = []
    for number, (source, kernel, with_residual) in enumerate(layers):
        values = (max(0, inputs + number - 1 - source),)
        residual = (data.draw(st.integers(0, inputs + number - 1)),) if with_residual else ()
        links.append(link(conv(8, 8, kernel), values + residual))
    outputs = data.draw(st.lists(st.integers(inputs, inputs + len(links) - 1), min_size=1, unique=True))
    given_inputs = [random(images, 8, *size, seed=seed) for seed in range(inputs)]
    unread = set(range(inputs)) - {number for one in links for number in one.inputs}
    if unread:
        return
    got = run_chain(given_inputs, links, outputs)
    for y, expected in zip(got, one_by_one(given_inputs, links, outputs), strict=True):
        assert torch.equal(y, expected)


def test_several_python_threads_at_once(threads):
    threads(2)
    links, wrong = residual_network(), []
    images = [random(2, 3, 64, 64, seed=seed) for seed in range(3)]
    expected = [one_by_one([x], links, (7,))[0] for x in images]

    def run(number):
        for _ in range(20):
            [y] = run_chain([images[number]], links, (7,))
            if not torch.equal(y, expected[number]):
                wrong.append(number)

    running = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert not wrong


def test_linear_layers(threads):
    threads(2)
    links = [link(Linear(40, 16, "relu"), (0,)), link(Linear(16, 40, scaled=True), (1, 0))]
    x = random(3, 5, 16)
    assert torch.equal(run_chain([x], links, (2,))[0], one_by_one([x], links, (2,))[0])


@pytest.mark.parametrize("at_end", [False, True], ids=["a guard page before", "a guard page after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3, 64, 64), (4, 3, 64, 64), (2, 3, 37, 50)])
def test_code_touches_only_its_buffers(shape, dtype, at_end, threads):
    threads(2)
    links = residual_network(dtype)
    x = random(*shape).to(dtype)
    expected = one_by_one([x], links, (7, 3))
    prepared = Chain(1, *described(links, (7, 3))).prepare([x])

    def run():  # in a process without threads: a schedule for two of them must get through with one
        torch.set_num_threads(1)
        x_memory = Guarded(x.numel() * x.element_size(), at_end)
        x_memory.tensor(dtype, x.shape, x.stride()).copy_(x)
        results = [Guarded(result.numbers * x.element_size(), at_end) for result in prepared.results]
        memory = Guarded(prepared.bytes, at_end)
        prepared.schedule(*(block.address for block in (x_memory, *results, memory)))
        for block, result, wanted in zip(results, prepared.results, expected, strict=True):
            assert torch.equal(block.tensor(dtype, result.shape, result.strides), wanted)

    assert in_child(run) == 0


def test_values_that_do_not_fit_are_refused():
    good = [link(conv(8, 8), (0,))]
    with pytest.raises(EngineError, match="before it is computed"):
        run_chain([random(1, 8, 4, 4)], [link(conv(8, 8), (1,))], (1,))
    with pytest.raises(EngineError, match=r"shape \(N, 8, H, W\)"):
        run_chain([random(1, 4, 4, 4)], good, (1,))
    with pytest.raises(EngineError, match="residual must have the shape"):
        run_chain([random(1, 8, 4, 4), random(1, 8, 4, 5)], [link(conv(8, 8), (0, 1))], (2,))
    with pytest.raises(EngineError, match="pooling"):
        run_chain([random(1, 8, 4)], [link(POOL, (0,))], (1,))


def test_layers_that_cannot_be_part_of_a_chain():
    shape = (1, 8, 8, 8)
    assert can_chain(conv(8, 8, 3, 2), shape)
    assert not can_chain(conv(8, 8, activation="gelu"), shape)
    assert not can_chain(replace(conv(8, 8), stride=(3, 3)), shape)
    assert not can_chain(Linear(8, 8, "gelu"), (1, 8))
    assert run_chain([random(*shape)], [link(replace(conv(8, 8), stride=(3, 3)), (0,))], (1,)) is None
    assert run_chain([random(*shape), random(*shape).bfloat16()], [link(conv(8, 8), (0, 1))], (2,)) is None


def test_changed_weights_are_noticed_and_chains_go_with_their_weights():
    links = [link(conv(8, 8), (0,)), link(conv(8, 8), (1,))]
    x = random(1, 8, 4, 4)
    [before] = run_chain([x], links, (2,))
    links[0].packed["values"].mul_(2)
    [after] = run_chain([x], links, (2,))
    assert not torch.equal(before, after)
    found = weakref.ref(chain_of(links, (2,)))
    assert found() is not None
    del links
    gc.collect()
    assert found() is None


def test_a_chain_forgets_old_shapes(monkeypatch):
    monkeypatch.setattr(chain, "_MAX_SHAPES", 3)
    links = [link(conv(8, 8), (0,)), link(conv(8, 8), (1,))]
    for width in range(1, 9):
        assert run_chain([random(1, 8, 3, width)], links, (2,))[0].shape == (1, 8, 3, width)
    assert len(chain_of(links, (2,))._prepared) <= 3
