"""The kernels against float64, on a Hopper GPU: layers of common networks and odd shapes, in every tile."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from halve.cuda_graphs import record
from halve.engine.kernels.wgmma_sp.family import WgmmaDense, WgmmaSparse
from halve.engine.kernels.wgmma_sp.launch import fitting, machine_code, variant_of
from halve.engine.kernels.wgmma_sp.tiling import TILES
from halve.engine.operations import ACTIVATIONS, Convolution, Linear
from halve.errors import EngineError

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or WgmmaSparse().unavailable(GPU, torch.float16) is not None,
        reason="needs a GPU with compute capability 9.0",
    ),
]
FAMILIES = (WgmmaSparse(), WgmmaDense())
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def conv(rows, channels, kernel=1, stride=1, padding=None, dilation=1, activation="relu"):
    padding = (kernel - 1) // 2 * dilation if padding is None else padding
    pairs = ((value, value) for value in (kernel, stride, padding, dilation))
    return Convolution(rows, channels, *pairs, activation=activation)


LAYERS = [
    *((conv(c, c, 3), (5, s, s)) for c, s in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *((conv(c, c, 3, 2), (3, s, s)) for c, s in ((128, 56), (256, 28), (512, 14))),
    (conv(256, 64), (3, 56, 56)),
    (conv(64, 256), (3, 56, 56)),
    (conv(512, 2048), (5, 7, 7)),
    (conv(512, 256, 1, 2), (3, 56, 56)),
    (conv(192, 96, 2, 2), (3, 14, 14)),
    (conv(384, 96, activation="gelu"), (2, 19, 3)),
]
WITH_RESIDUALS = LAYERS[:4] + LAYERS[7:10]
ODD = [
    (conv(72, 40, 3), (2, 13, 17)),
    (conv(200, 136, 5), (3, 9, 11)),
    (conv(64, 64, 7), (2, 20, 20)),
    (conv(64, 64, 3, padding=0), (2, 12, 12)),
    (conv(64, 128, 3, dilation=2), (2, 15, 15)),
    (conv(64, 64, 3, 2, padding=0), (2, 15, 13)),
    (conv(64, 64, 5, 2, padding=1), (2, 17, 17)),
    (conv(8, 8, 3), (1, 1, 1)),
    (conv(64, 64, 3), (1, 2, 3)),
    (conv(64, 64, 3), (1, 1, 200)),
    (conv(64, 64, 3), (2, 70, 100)),
    (conv(384, 96), (1, 1, 1)),
]


class Problem:
    def __init__(self, convolution, size, dtype=torch.float16, *, residual=False, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, device=GPU)

        weight = randn(*convolution.weight_shape) / (convolution.channels * convolution.kernel[0] ** 2) ** 0.5
        blocks = weight.unflatten(1, (-1, 4))
        kept = torch.rand(blocks.shape, generator=generator, device=GPU).argsort(2) < 2
        self.tensors = {"weight": (blocks * kept).flatten(1, 2).to(dtype), "bias": randn(convolution.rows)}
        x = randn(size[0], convolution.channels, *size[1:])
        added = [randn(*convolution.out_shape(x.shape))] if residual else []
        self.inputs = [t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, *added)]
        self.convolution, self.dtype, self.residual = convolution, dtype, residual

    def worst(self, got):
        """The largest error against float64, over what rounding may contribute."""
        c, bias = self.convolution, self.tensors["bias"].double()
        x, w, extra = self.inputs[0].double(), self.tensors["weight"].double(), self.inputs[1:]
        y = F.conv2d(x, w, bias, c.stride, c.padding, c.dilation) + sum(e.double() for e in extra)
        size = F.conv2d(x.abs(), w.abs(), bias.abs(), c.stride, c.padding, c.dilation)
        size = size + sum(e.double().abs() for e in extra)
        return float(((got.double() - ACTIVATIONS[c.activation].function(y)).abs() / size).nan_to_num(1e9).max())

    def plan(self, family, tile):
        return fitting(self.inputs[0], self.convolution, tile, sparse=family.sparse, residual=self.residual)

    def variant(self, family, plan):
        return variant_of(plan, self.convolution, self.dtype, sparse=family.sparse, residual=self.residual)

    def run(self, family, tile):
        shape = self.convolution.out_shape(self.inputs[0].shape)
        torch.full(shape, float("nan"), dtype=self.dtype, device=GPU)  # the result will reuse this memory
        return family.run(self.inputs, family.pack(self.convolution, self.tensors), self.convolution, tile)


def check(problems, families=FAMILIES, tiles=TILES):
    jobs = [
        (problem, family, tile, plan)
        for problem, family, tile in itertools.product(problems, families, tiles)
        if (plan := problem.plan(family, tile)) is not None
    ]
    with ThreadPoolExecutor() as pool:  # compiling takes most of the time
        list(pool.map(lambda job: machine_code(job[0].variant(job[1], job[3]), "sm_90a"), jobs))
    assert len(jobs) >= 2 * len(problems)
    for problem, family, tile, _ in jobs:
        worst = problem.worst(problem.run(family, tile))
        assert worst < TOLERANCE[problem.dtype], (problem.convolution, family.name, tile, worst)


def test_layers_of_networks():
    check([Problem(convolution, size) for convolution, size in LAYERS])


def test_residuals():
    check([Problem(convolution, size, residual=True) for convolution, size in WITH_RESIDUALS])


def test_odd_shapes():
    check([Problem(convolution, size, residual=bool(i % 2)) for i, (convolution, size) in enumerate(ODD)])


def test_bfloat16():
    check([Problem(convolution, size, torch.bfloat16) for convolution, size in LAYERS[1:8:2]], [WgmmaSparse()])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    """In one tile for each way to store results: compiling takes most of the time."""
    tiles = "128x128", "64x256 own", "64x128 own 3x3", "128x64k2 light", "64x64 halves light"
    layers = (conv(64, 64, 3, activation=activation), (2, 14, 14)), (conv(64, 64, activation=activation), (2, 14, 14))
    check([Problem(*layer, residual=True) for layer in layers], [WgmmaSparse()], tiles)


def test_linear_layers():
    problem = Problem(conv(384, 96), (1, 197, 2))
    x = problem.inputs[0].permute(0, 2, 3, 1)
    linear = Linear(384, 96, activation="relu")
    packed = WgmmaSparse().pack(linear, {**problem.tensors, "weight": problem.tensors["weight"].flatten(1)})
    got = WgmmaSparse().run([x], packed, linear, "128x128")
    assert problem.worst(got.permute(0, 3, 1, 2)) < TOLERANCE[torch.float16]


def test_a_scale_applies_to_weight_and_bias_but_not_to_the_residual():
    problem = Problem(conv(96, 384, activation="none"), (2, 28, 28), residual=True)
    scale = torch.randn(96, device=GPU)
    scaled = replace(problem.convolution, scaled=True)
    x, w, residual = problem.inputs[0].double(), problem.tensors["weight"].double(), problem.inputs[1].double()
    y = F.conv2d(x, w, problem.tensors["bias"].double())
    for family, tile in itertools.product(FAMILIES, ("128x192", "64x256 own", "128x64 own")):
        packed = family.pack(scaled, {**problem.tensors, "scale": scale})
        got = family.run(problem.inputs, packed, scaled, tile)
        expected = y * scale.double().reshape(-1, 1, 1) + residual
        assert float((got - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("residual", [False, True])
def test_many_tiles_repeated_and_recorded_are_bitwise_the_same(residual):
    """Large enough that blocks take several tiles; recorded kernels start before the previous one is done."""
    problem = Problem(conv(128, 128, 3), (96, 28, 28), residual=residual)
    chain = [problem.convolution, replace(problem.convolution, activation="none")]
    sparse = "64x256 own", "128x256", "64x128 own 3x3", "64x128 halves 3x3"
    for family, tile in (*((WgmmaSparse(), tile) for tile in sparse), (WgmmaDense(), "128x128")):
        packed = family.pack(problem.convolution, problem.tensors)

        def run(family=family, tile=tile, packed=packed):
            x, *others = problem.inputs
            for convolution in chain * 4:
                x = family.run([x, *others], packed, convolution, tile)
            return x

        expected = run()
        assert all(torch.equal(run(), expected) for _ in range(5))
        graph, out = record(run, GPU)
        for _ in range(5):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_that_do_not_fit_into_a_tile_run_in_another(family, monkeypatch):
    problem = Problem(conv(512, 512, 3), (256, 7, 7), residual=True)
    assert problem.plan(family, "128x128k4") is None
    monkeypatch.setattr(type(family), "reference", None)  # would raise if called
    assert problem.worst(problem.run(family, "128x128k4")) < TOLERANCE[torch.float16]


def test_images_that_fit_into_no_tile_run_the_reference():
    problem = Problem(conv(64, 64, 3), (1, 3, 300))
    assert problem.plan(WgmmaSparse(), "128x256") is None
    assert problem.worst(problem.run(WgmmaSparse(), "128x256")) < TOLERANCE[torch.float16]


def test_an_empty_batch_returns_an_empty_result():
    problem = Problem(conv(64, 64, 3), (2, 14, 14), residual=True)
    inputs = [x[:0] for x in problem.inputs]
    for family, tile in itertools.product(FAMILIES, ("128x256", "128x128k4")):
        got = family.run(inputs, family.pack(problem.convolution, problem.tensors), problem.convolution, tile)
        assert got.shape == (0, 64, 14, 14)
        assert got.is_contiguous(memory_format=torch.channels_last)


def test_weights_that_are_not_aligned_are_refused():
    problem = Problem(conv(64, 64, 3), (2, 14, 14))
    packed = WgmmaSparse().pack(problem.convolution, problem.tensors)
    blocks = packed["blocks"]
    packed["blocks"] = torch.cat([blocks.new_zeros(1), blocks.flatten()])[1:].view(blocks.shape)
    with pytest.raises(EngineError, match="blocks must be aligned to 16 bytes"):
        WgmmaSparse().run(problem.inputs, packed, problem.convolution, "128x256")


def test_slices_and_other_layouts():
    problem = Problem(conv(64, 64, 3), (4, 14, 14))
    whole = problem.run(WgmmaSparse(), "128x256")
    x = problem.inputs[0]
    for given in (x.contiguous(), x[1:], torch.cat([x.flatten()[:1], x.permute(0, 2, 3, 1).flatten()])[1:]):
        shaped = given if given.dim() == 4 else given.reshape(4, 14, 14, 64).permute(0, 3, 1, 2)
        packed = WgmmaSparse().pack(problem.convolution, problem.tensors)
        got = WgmmaSparse().run([shaped], packed, problem.convolution, "128x256")
        assert torch.equal(got, whole[-len(shaped) :])
