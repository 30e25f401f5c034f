"""A convolution and its shortcut in one kernel, against float64, in every tile."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from halve.engine.kernels.wgmma_sp.joined import JoinedDense, JoinedSparse
from halve.engine.kernels.wgmma_sp.tiling import TILES
from halve.engine.operations import JoinedConvolution

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or JoinedSparse().unavailable(GPU, torch.float16) is not None,
        reason="needs a GPU with compute capability 9.0",
    ),
]
FAMILIES = (JoinedSparse(), JoinedDense())


def joined(rows, channels, kernel, shortcut_channels, stride, activation="relu"):
    padding = ((kernel - 1) // 2,) * 2
    return JoinedConvolution(
        rows, channels, (kernel,) * 2, padding, (1, 1), activation, shortcut_channels, (stride,) * 2
    )


ENDS = [  # of blocks, and the size of their first input
    (joined(256, 64, 1, 64, 1), (5, 56, 56)),
    (joined(512, 128, 1, 256, 2), (5, 28, 28)),
    (joined(1024, 256, 1, 512, 2), (6, 14, 14)),
    (joined(2048, 512, 1, 1024, 2), (8, 7, 7)),
    (joined(2048, 512, 1, 1024, 2), (1, 7, 7)),
    (joined(128, 128, 3, 64, 2), (8, 28, 28)),
    (joined(512, 512, 3, 256, 2), (3, 7, 7)),
    (joined(200, 136, 3, 72, 2, "silu"), (3, 9, 11)),
    (joined(64, 72, 1, 40, 1, "none"), (3, 5, 7)),
    (joined(64, 72, 1, 40, 2), (2, 13, 9)),
]


def random_2_4(*shape, generator, dtype):
    weight = torch.randn(*shape, generator=generator, device=GPU) / (shape[1] * shape[2] ** 2) ** 0.5
    blocks = weight.unflatten(1, (-1, 4))
    kept = torch.rand(blocks.shape, generator=generator, device=GPU).argsort(2) < 2
    return (blocks * kept).flatten(1, 2).to(dtype)


class Problem:
    def __init__(self, operation, size, dtype):
        generator = torch.Generator("cuda").manual_seed(0)
        stride = operation.shortcut_stride[0]
        shapes = (
            (operation.channels, *size[1:]),
            (operation.shortcut_channels, *(stride * (s - 1) + 1 for s in size[1:])),
        )
        self.operation, self.dtype = operation, dtype
        self.inputs = [
            torch.randn(size[0], *shape, generator=generator, device=GPU)
            .to(dtype)
            .contiguous(memory_format=torch.channels_last)
            for shape in shapes
        ]
        self.tensors = {
            "weight": random_2_4(*operation.weight_shape, generator=generator, dtype=dtype),
            "shortcut_weight": random_2_4(*operation.shortcut.weight_shape, generator=generator, dtype=dtype),
            "bias": torch.randn(operation.rows, generator=generator, device=GPU),
        }

    def worst(self, got):
        wide = {name: tensor.double() for name, tensor in self.tensors.items()}
        expected = self.operation.reference([x.double() for x in self.inputs], wide)
        size = sum(
            F.conv2d(x.double().abs(), wide[name].abs(), None, one.stride, one.padding)
            for x, name, one in zip(
                self.inputs,
                ("weight", "shortcut_weight"),
                (self.operation.convolution, self.operation.shortcut),
                strict=True,
            )
        )
        size = size + wide["bias"].abs().reshape(-1, 1, 1)
        return float(((got.double() - expected).abs() / size).nan_to_num(1e9).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.2e-2)])
def test_ends_of_residual_blocks(dtype, tolerance):
    problems = [Problem(*end, dtype) for end in ENDS[:: 1 if dtype == torch.float16 else 3]]
    jobs = [
        (problem, family, tile)
        for problem, family, tile in itertools.product(problems, FAMILIES, TILES)
        if family.fits(problem.inputs, problem.operation, tile)
    ]
    assert len(jobs) > 4 * len(problems)
    with ThreadPoolExecutor() as pool:  # compiling takes most of the time
        list(pool.map(lambda job: job[1].compilation(job[0].inputs, job[0].operation, job[2])(), jobs))
    for problem, family, tile in jobs:
        torch.full(problem.operation.out_shape(problem.inputs[0].shape), float("nan"), dtype=dtype, device=GPU)
        packed = family.pack(problem.operation, problem.tensors)
        got = family.run(problem.inputs, packed, problem.operation, tile)  # in memory of NaNs
        assert problem.worst(got) < tolerance, (problem.operation, family.name, tile)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_that_do_not_fit_into_a_tile_run_in_another(family, monkeypatch):
    problem = Problem(joined(512, 512, 3, 256, 2), (256, 7, 7), torch.float16)
    assert not family.fits(problem.inputs, problem.operation, "128x128k4")
    packed = family.pack(problem.operation, problem.tensors)
    with monkeypatch.context() as patch:
        patch.setattr(JoinedConvolution, "reference", None)  # would raise if called
        got = family.run(problem.inputs, packed, problem.operation, "128x128k4")
    assert problem.worst(got) < 2e-3
